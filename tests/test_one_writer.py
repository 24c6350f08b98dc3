"""That one rank alone writes a run's record, on real jobs: who touches files, and who waits for whom."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from subprocess import PIPE

import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from tests.support.launch import ALONE, PROGRAM, SEARCHES, Mpi, finish
from tests.support.outcome import finished, trials_of

BUSY = SEARCHES / "busy.py"

# Notes which rank has opened, renamed or removed what in the run directory, and whether it was by then a rank.
WATCHED = """
import json, os, sys, time

ran = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))
folder = os.environ["WATCHED_FOLDER"]

def note(event, arguments):
    if event in ("open", "os.rename", "os.remove", "os.symlink", "os.link", "os.mkdir", "os.listdir", "os.scandir"):
        paths = [os.fsdecode(one) for one in arguments if isinstance(one, (str, bytes, os.PathLike))]
        touched = [path for path in paths if os.path.abspath(path).startswith(folder + "/")]
        if touched and ran is not None:
            line = json.dumps([int(ran), event, os.path.relpath(touched[0], folder), time.time()]) + chr(10)
            os.write(noted, line.encode())

noted = os.open(os.environ["WATCHED_NOTES"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
sys.addaudithook(note)
"""


def touched(folder: Path, mpi: Mpi, *arguments: object) -> list[tuple[int, str, str]]:
    """Run a search on four ranks, and return what its ranks did to files from its first evaluation to its last."""
    (folder / "sitecustomize.py").write_text(WATCHED)
    variables = {
        "PYTHONPATH": f"{folder}:{PROGRAM.parent}",
        "WATCHED_FOLDER": str(folder / "run"),
        "WATCHED_NOTES": str(folder / "notes"),
    }
    process = mpi.start(4, PROGRAM, *arguments, "--run-dir", folder / "run", cwd=folder, stdout=PIPE, **variables)
    job = finish(process)
    assert job.returncode == 0, job.stderr
    trials = trials_of(folder / "run")
    first = min(trial.datetime_start.timestamp() for trial in trials if trial.datetime_start)
    last = max(trial.datetime_complete.timestamp() for trial in trials if trial.datetime_complete)
    notes = [json.loads(line) for line in (folder / "notes").read_text().splitlines()]
    return [(rank, event, path) for rank, event, path, when in notes if first < when < last]


def test_the_first_rank_alone_touches_the_run_directory(each_mpi: Mpi, tmp_path: Path) -> None:
    done = touched(tmp_path, each_mpi, BUSY, *ALONE, "--evaluations", 12, "--set", "seconds=0.2")
    assert done, "nothing was written, or nothing noted"
    assert {rank for rank, _, _ in done} == {0}
    assert {path for _, _, path in done} <= {"study.log", "study.log.lock", "printed"} | {
        *(f"printed/{trial}.txt" for trial in range(12)),
        *(path for _, _, path in done if path.startswith("study.log.lock.")),
    }
    assert Counter(path for _, event, path in done if event == "open")["study.log"] == 0, "it is kept open"


def test_other_ranks_write_weights_and_states_alone_and_put_nothing_in_its_place(mpi: Mpi, tmp_path: Path) -> None:
    search = PROGRAM.parent / "search_spaces" / "digits_cnn.py"
    settings = ["--set", "epochs=4", "--evaluations", 8, "--save-every", "1s"]
    done = touched(tmp_path, mpi, search, "--ranks-per-worker", 2, *settings)
    others = {path for rank, _, path in done if rank != 0}
    assert others, "nobody had the best, or saved"
    assert {Path(path).parts[0] for path in others} <= {"states"} | {
        path for path in others if path.startswith(".best.safetensors.")
    }


@pytest.mark.parametrize("way", ["python", "native"])
def test_others_go_on_while_the_first_rank_is_busy(mpi: Mpi, way: str, tmp_path: Path) -> None:
    arguments = [BUSY, *ALONE, "--evaluations", 12, "--set", f"way={way}", "--propagators", "random"]
    job = mpi.run(2, PROGRAM, *arguments, "--run-dir", "run", cwd=tmp_path)
    assert job.returncode == 0, job.stderr
    trials = trials_of(tmp_path / "run")
    busy = next(trial for trial in trials if trial.user_attrs["worker"] == 0)
    assert busy.datetime_start is not None
    assert busy.datetime_complete is not None
    during = [
        trial
        for trial in trials
        if trial.datetime_start and trial.datetime_complete and trial.user_attrs["worker"] == 1
        if busy.datetime_start < trial.datetime_start and trial.datetime_complete < busy.datetime_complete
    ]
    assert len(during) >= 5, "the other worker waited for the first rank"
    assert len(finished(trials)) == 12
    assert {(tmp_path / "run" / "printed" / f"{trial.number}.txt").exists() for trial in trials} == {True}


def test_the_lock_of_the_journal_is_gone_when_a_run_has_ended(mpi: Mpi, tmp_path: Path) -> None:
    job = mpi.run(
        2, PROGRAM, BUSY, *ALONE, "--evaluations", 4, "--run-dir", "run", "--set", "seconds=0.1", cwd=tmp_path
    )
    assert job.returncode == 0, job.stderr
    assert not list((tmp_path / "run").glob("*.lock*"))
    storage = JournalStorage(JournalFileBackend(str(tmp_path / "run" / "study.log")))
    study = storage.get_study_id_from_name("run")
    storage.set_study_user_attr(study, "note", "by another program")  # it would wait for a lock
    assert storage.get_study_user_attrs(study)["note"] == "by another program"
