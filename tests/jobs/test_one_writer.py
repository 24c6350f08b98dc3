"""Test that only the first rank writes the record, and that workers do not wait for it."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from subprocess import PIPE

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from tests.support.launch import ALONE, PROGRAM, SEARCHES, Mpi, wait_for_job
from tests.support.limits import scale
from tests.support.run_output import find_complete_losses, load_trials

BUSY = SEARCHES / "busy.py"

# Records which rank opens, renames or removes which file in the run directory; templates and
# trainers are rank -1.
AUDIT_HOOK = """
import json, os, sys, time

ran = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", -1))
folder = os.environ["AUDITED_FOLDER"]

EVENTS = ["open"]
EVENTS += ["os." + n for n in "rename remove symlink link mkdir listdir scandir".split()]
PATHS = (str, bytes, os.PathLike)

def note(event, arguments):
    if event in EVENTS:
        paths = [os.fsdecode(one) for one in arguments if isinstance(one, PATHS)]
        touched = [path for path in paths if os.path.abspath(path).startswith(folder + "/")]
        if touched:
            path = os.path.relpath(touched[0], folder)
            line = json.dumps([int(ran), event, path, time.time()]) + chr(10)
            os.write(noted, line.encode())

noted = os.open(os.environ["AUDIT_NOTES"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
sys.addaudithook(note)
"""


def record_file_access(folder: Path, mpi: Mpi, *arguments: object) -> list[tuple[int, str, str]]:
    """Run a search on four ranks.

    Return all file accesses from the first start to the last end of an evaluation.
    """
    (folder / "sitecustomize.py").write_text(AUDIT_HOOK)
    variables = {
        "PYTHONPATH": f"{folder}:{PROGRAM.parent}",
        "AUDITED_FOLDER": str(folder / "run"),
        "AUDIT_NOTES": str(folder / "notes"),
    }
    mpi = replace(mpi, forks_templates=False)  # so that Python imports sitecustomize.py
    process = mpi.start(
        4, PROGRAM, *arguments, "--run-dir", folder / "run", cwd=folder, stdout=PIPE, **variables
    )
    job = wait_for_job(process)
    assert job.returncode == 0, job.stderr
    trials = load_trials(folder / "run")
    first = min(trial.datetime_start.timestamp() for trial in trials if trial.datetime_start)
    last = max(trial.datetime_complete.timestamp() for trial in trials if trial.datetime_complete)
    notes = [json.loads(line) for line in (folder / "notes").read_text().splitlines()]
    return [(rank, event, path) for rank, event, path, when in notes if first < when < last]


def test_run_dir_is_changed_by_first_rank_only(each_mpi: Mpi, tmp_path: Path) -> None:
    accesses = record_file_access(
        tmp_path, each_mpi, BUSY, *ALONE, "--evaluations", 12, "--set", "seconds=0.2"
    )
    assert accesses, "no file access was recorded"
    assert {rank for rank, _, _ in accesses} == {0}
    assert {path for _, _, path in accesses} <= {"study.log", "study.log.lock", "logs"} | {
        *(f"logs/{trial}.txt" for trial in range(12)),
        *(path for _, _, path in accesses if path.startswith("study.log.lock")),
    }
    assert Counter(path for _, event, path in accesses if event == "open")["study.log"] == 0, (
        "the journal must stay open"
    )
    assert not list((tmp_path / "run").glob("*.lock*"))
    storage = JournalStorage(JournalFileBackend(str(tmp_path / "run" / "study.log")))
    study = storage.get_study_id_from_name("run")
    # It would wait for a lock that was left.
    storage.set_study_user_attr(study, "note", "by another program")
    assert storage.get_study_user_attrs(study)["note"] == "by another program"


def test_leaders_alone_write_checkpoints_and_weights(mpi: Mpi, tmp_path: Path) -> None:
    settings = [
        "--set",
        "epochs=4",
        "--set",
        "seconds=0.4",
        "--evaluations",
        6,
        "--checkpoint-every",
        "1s",
    ]
    accesses = record_file_access(
        tmp_path, mpi, SEARCHES / "saving.py", "--ranks-per-worker", 2, *settings
    )
    by_rank = {
        rank: {(event, path) for other, event, path in accesses if other == rank}
        for rank in range(-1, 4)
    }
    assert by_rank[-1] == set(), "trainers must touch no files of the run"
    assert by_rank[1] == by_rank[3] == set(), "ranks that are not leaders must touch no files"
    opened = {path for rank in (0, 2) for event, path in by_rank[rank] if event == "open"}
    drafts = {path for path in opened if path.startswith("checkpoints/.")}
    assert drafts, "no checkpoint was written"
    assert any(path.startswith(".best.safetensors.") for path in opened), "no weights were written"
    assert by_rank[2], "the second leader must write its checkpoints"
    assert all(path.startswith(("checkpoints", ".best.safetensors.")) for _, path in by_rank[2])
    renamed = {path for rank in (0, 2) for event, path in by_rank[rank] if event == "os.rename"}
    assert renamed >= drafts
    assert {path for path in renamed if path.startswith(".best")} <= {
        path for _, path in by_rank[0]
    }


def test_worker_continues_while_first_ranks_trainer_is_busy(mpi: Mpi, tmp_path: Path) -> None:
    arguments = [
        BUSY,
        *ALONE,
        "--evaluations",
        12,
        "--set",
        "way=native",
        "--set",
        f"seconds={scale(4.0)}",
        "--propagators",
        "random",
    ]
    job = mpi.run(2, PROGRAM, *arguments, "--run-dir", "run", cwd=tmp_path)
    assert job.returncode == 0, job.stderr
    trials = load_trials(tmp_path / "run")
    busy = next(trial for trial in trials if trial.user_attrs["worker"] == 0)
    assert busy.datetime_start is not None
    assert busy.datetime_complete is not None
    during = [
        trial
        for trial in trials
        if trial.datetime_start and trial.datetime_complete and trial.user_attrs["worker"] == 1
        if busy.datetime_start < trial.datetime_start
        and trial.datetime_complete < busy.datetime_complete
    ]
    assert len(during) >= 5, "the second worker must not wait for the root rank"
    starts = [trial.datetime_start.timestamp() for trial in during if trial.datetime_start]
    assert statistics.median(later - earlier for earlier, later in pairwise(starts)) < scale(0.3), (
        "each evaluation takes 0.05 s"
    )
    assert len(find_complete_losses(trials)) == 12
    assert {(tmp_path / "run" / "logs" / f"{trial.number}.txt").exists() for trial in trials} == {
        True
    }
