"""Test trainers: the objective's environment, reasons to replace a trainer, and output."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpo.process.launcher import is_first_on_host, make_plain_environment, make_template_environment
from tests.support.launch import PROGRAM, SEARCHES, Mpi
from tests.support.run_output import find_complete_losses, load_trials, remove_loading_lines

TORCHRUN = SEARCHES / "torchrun.py"
LEAVING = SEARCHES / "leaving.py"
START = (
    "space = SearchSpace(k=Int(0, 9))\n\n\ndef objective(params, worker):\n    return params['k']\n"
)

TEMPORARY = """
import tempfile
from pathlib import Path

from hpo import Int, SearchSpace

space = SearchSpace(k=Int(0, 9))
folder = tempfile.TemporaryDirectory(dir=".")
data = Path(folder.name, "data.txt").absolute()
data.write_text("2")


def objective(params, worker):
    return params["k"] + int(data.read_text())
"""


def read_rank_notes(folder: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rank and the notes for each file that an evaluation has written on a rank."""
    for path in sorted(folder.glob("*-?.json")):
        yield int(path.stem.partition("-")[2]), json.loads(path.read_text())


@pytest.mark.parametrize("size", [2, 3])
def test_objective_for_torchrun_runs_unchanged(each_mpi: Mpi, tmp_path: Path, size: int) -> None:
    if each_mpi.flags and size == 3:
        pytest.skip("one size is enough for another MPI")
    options = [
        "--ranks-per-worker",
        size,
        "--islands",
        1,
        "--evaluations",
        3,
        "--set",
        f"folder={tmp_path}",
    ]
    job = each_mpi.run(size, PROGRAM, TORCHRUN, *options, "--run-dir", "run", cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, ""), job.stdout
    found = list(read_rank_notes(tmp_path))
    assert len(found) == 3 * size
    for rank, seen in found:
        environment, comm = seen["environment"], seen["comm"]
        expected: dict[str, object] = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "GROUP_RANK": 0,
        }
        expected |= {
            "GROUP_WORLD_SIZE": 1,
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
        }
        expected |= {
            "ROLE_NAME": "default",
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
        }
        expected |= {"TORCHELASTIC_RUN_ID": "hpo", "TORCHELASTIC_USE_AGENT_STORE": True}
        assert {name: environment[name] for name in expected} == {
            name: str(value) for name, value in expected.items()
        }
        launchers = ("PMI", "MPI", "HYD", "OMPI", "PRTE", "SLURM_PROCID", "SLURM_NTASKS")
        assert [name for name in environment if name.startswith(launchers)] == []
        before, ranks = (rank - 1) % size, list(range(size))
        assert comm == {
            "received": [[before], {"from": before}],
            "bcast": 1,
            "gather": ranks if rank == 1 else None,
            "allgather": list(map(str, ranks)),
            "allreduce": sum(ranks),
            "reduce": size if rank == 0 else None,
            "sizes": [rank, size, rank, size],
        }
        assert seen["samples"] == list(range(8))
        assert seen["met"] <= size


def test_trainer_with_leftovers_is_replaced(mpi: Mpi, tmp_path: Path) -> None:
    given = [{"k": k} for k in (0, 4, 1, 2, 3, 5)]
    (tmp_path / "given.json").write_text(json.dumps([*given]))
    options = [
        "--ranks-per-worker",
        1,
        "--islands",
        1,
        "--evaluations",
        6,
        "--enqueue",
        "given.json",
    ]
    job = mpi.run(1, PROGRAM, LEAVING, *options, "--run-dir", "run", cwd=tmp_path)
    assert (job.returncode, job.stderr.replace("worker 0 rank 0 | 99%\n", "")) == (0, "")
    found = re.findall(
        r"^worker 0 rank 0 \| way (\w+) process (\d+) folder (.*)$", job.stdout, re.MULTILINE
    )
    assert [way for way, _, _ in found] == [
        "nothing",
        "settings",
        "thread",
        "child",
        "group",
        "daemon",
    ]
    processes = [process for _, process, _ in found]
    assert len(set(processes[:3])) == 1, "the first two leave nothing in the trainer"
    assert len(set(processes[2:])) == 4, "each of these leaves something"
    assert {folder for _, _, folder in found} == {str(tmp_path)}
    for trial in range(6):
        kept = (tmp_path / "run" / "logs" / f"{trial}.txt").read_text()
        assert kept.count("rank 0 | native code\n") == kept.count("rank 0 | a child\n") == 1
        assert "rank 0 | 99%\n" in kept
        assert "10%" not in kept
    assert job.stdout.count("worker 0 rank 0 | native code\n") == 6
    time.sleep(0.5)
    assert not [
        path
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if b"sleep\x003607" in _read_bytes(path)
    ]
    fresh = mpi.run(
        1,
        PROGRAM,
        LEAVING,
        *options[:-3],
        2,
        *options[-2:],
        "--fresh-trainers",
        "--run-dir",
        "fresh",
        cwd=tmp_path,
    )
    assert len(set(re.findall(r"process (\d+)", fresh.stdout))) == 2, (
        "each evaluation has its own process"
    )


def test_new_trainer_keeps_temporary_folder_of_search_file(mpi: Mpi, tmp_path: Path) -> None:
    search = tmp_path / "temporary.py"
    search.write_text(TEMPORARY)
    options = ["--islands", 1, "--evaluations", 3, "--fresh-trainers", "--run-dir", "run"]
    job = mpi.run(1, PROGRAM, search, *options, cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    assert [trial.state.name for trial in load_trials(tmp_path / "run")] == ["COMPLETE"] * 3


def test_logging_in_search_file_is_shown_and_kept(mpi: Mpi, tmp_path: Path) -> None:
    """Logging may be configured in the file, in the objective, or not at all."""
    text = "import logging, sys\nfrom hpo import Int, SearchSpace\n{}"
    text += "space = SearchSpace(k=Int(0, 9))\nlog = logging.getLogger('mine')\n"
    text += (
        "def objective(params, worker):\n    {}\n    log.info('at info')\n    log.warning('at "
        "warning')\n    return 1\n"
    )
    config = (
        "logging.basicConfig(level=logging.INFO, format='%(name)s: %(message)s', stream=sys.{})"
    )
    files = {
        "file": (config.format("stderr") + "\n", "pass", ["mine: at info", "mine: at warning"]),
        "objective": ("", config.format("stdout"), ["mine: at info", "mine: at warning"]),
        "none": ("", "pass", ["WARNING mine: at warning"]),
    }
    for name, (file_code, objective_code, lines) in files.items():
        (tmp_path / f"{name}.py").write_text(text.format(file_code, objective_code))
        options = ["--ranks-per-worker", 1, "--evaluations", 2, "--run-dir", f"run-{name}"]
        job = mpi.run(1, PROGRAM, f"{name}.py", *options, cwd=tmp_path)
        assert job.returncode == 0, job.stderr
        stream = job.stdout if name == "objective" else job.stderr
        labelled = [line for line in stream.splitlines() if line.startswith("worker 0 rank 0 | ")]
        assert labelled == [f"worker 0 rank 0 | {line}" for line in lines] * 2, name
        for trial in range(2):
            kept = (tmp_path / f"run-{name}" / "logs" / f"{trial}.txt").read_text().splitlines()
            assert kept[-len(lines) :] == [f"rank 0 | {line}" for line in lines]


def test_compiler_and_collectives_work_in_each_evaluation(mpi: Mpi, tmp_path: Path) -> None:
    """One evaluation fails, and a trainer is replaced.

    There are more compilations than torch allows in one process.
    """
    (tmp_path / "given.json").write_text(json.dumps([{"k": k} for k in (50, 2, 51, 3)]))
    options = [
        "--ranks-per-worker",
        2,
        "--evaluations",
        16,
        "--enqueue",
        "given.json",
        "--run-dir",
        "run",
    ]
    job = mpi.run(2, PROGRAM, SEARCHES / "lasting.py", *options, cwd=tmp_path)
    assert job.returncode == 0, job.stderr
    failures = [trial.user_attrs.get("failure") for trial in load_trials(tmp_path / "run")]
    assert len(failures) == 16
    (failure,) = [text for text in failures if text]
    assert re.fullmatch(r"rank [01], lasting.py:\d+: ValueError: no", failure)
    assert "recompile_limit" not in job.stdout + job.stderr


def test_attributes_of_a_process_are_equal_in_all_evaluations(mpi: Mpi, tmp_path: Path) -> None:
    """A failing evaluation would replace its trainer anyway, so all of them succeed."""
    options = ["--evaluations", 13, "--run-dir", "run"]
    job = mpi.run(1, PROGRAM, SEARCHES / "leaking.py", *options, cwd=tmp_path)
    assert job.returncode == 0, job.stderr
    assert {trial.state.name for trial in load_trials(tmp_path / "run")} == {"COMPLETE"}
    seen = re.findall(r"seen (.*)$", job.stderr, re.MULTILINE)
    assert (len(seen), len(set(seen))) == (13, 1), job.stderr
    greetings = re.findall(r"hello from (\d+)$", job.stdout, re.MULTILINE)
    assert list(map(int, greetings)) == list(range(13))


def test_process_changes_by_objective_stay_in_its_trainer(mpi: Mpi, tmp_path: Path) -> None:
    """The search file changes numpy's errors, folder, dtype, environment, umask and stdout."""
    given = [{"x": 1e-300, "y": 0.0}, {"x": 1e-300, "y": 1.0}]
    (tmp_path / "given.json").write_text(json.dumps(given))
    (tmp_path / "changing.py").write_text((SEARCHES / "changing.py").read_text())
    options = [
        "--ranks-per-worker",
        2,
        "--propagators",
        "tpe",
        "--enqueue",
        "given.json",
        "--run-dir",
        "run",
    ]
    job = mpi.run(4, PROGRAM, "changing.py", *options, "--evaluations", 18, cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    assert remove_loading_lines(job.stdout).startswith("bytes at import\nwrapped at import\n")
    assert {trial.state.name for trial in load_trials(tmp_path / "run")} == {"COMPLETE"}
    mask = os.umask(0o022)
    os.umask(mask)
    seen = re.findall(r"^worker \d rank \d \| seen (.*)$", job.stdout, re.MULTILINE)
    assert (len(seen), set(seen)) == (36, {f"torch.float32 raise {mask} None {tmp_path}"})
    assert (
        job.stdout.count(" | bytes in an evaluation\n")
        == job.stdout.count(" | wrapped in an evaluation\n")
        == 36
    )
    assert (tmp_path / "run" / "report.html").exists()


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_search_file_unsafe_to_fork_is_imported_by_trainers(mpi: Mpi, tmp_path: Path) -> None:
    text = "import threading, time\nfrom hpo import Int, SearchSpace\n"
    text += "threading.Thread(target=time.sleep, args=(999,), daemon=True).start()\n" + START
    text += "\nspace.require(lambda p: p['k'] != 3, 'not three')\n\ndef prepare():\n    return 5\n"
    (tmp_path / "my_search.py").write_text(
        text + "\n\nwith open(__file__, 'a') as file:\n    file.write('# saved\\n')\n"
    )
    before = (tmp_path / "my_search.py").read_text()
    options = ["--ranks-per-worker", 1, "--islands", 1, "--evaluations", 20]
    job = mpi.run(2, PROGRAM, "my_search.py", *options, "--run-dir", "run", cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    assert (
        job.stdout.count(
            "my_search.py: when it is imported, it starts 1 thread: each trainer imports it\n"
        )
        == 1
    )
    losses = sorted(find_complete_losses(load_trials(tmp_path / "run")).values())
    assert losses == [0, 1, 2, 4, 5, 6, 7, 8, 9], "all values that the constraint allows"
    assert (tmp_path / "run" / "search_space-1.py").read_text() == before, (
        "the run uses the file as it was first read"
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "import ctypes; ctypes.string_at(0)",
            "my_search.py: the process that imports it was ended by SIGSEGV",
        ),
        ("import os; os._exit(7)", "my_search.py: the process that imports it ended with status 7"),
        ("import missing_module", "my_search.py could not be imported:\nTraceback"),
    ],
)
def test_search_file_that_crashes_ends_run_with_message(
    mpi: Mpi, tmp_path: Path, line: str, message: str
) -> None:
    (tmp_path / "my_search.py").write_text(
        f"print('begun')\n{line}\nfrom hpo import Int, SearchSpace\n{START}"
    )
    job = mpi.run(2, PROGRAM, "my_search.py", "--run-dir", "run", cwd=tmp_path)
    assert (job.returncode, remove_loading_lines(job.stdout)) == (2, "begun\n")
    assert f"error: {message}" in job.stderr
    assert len(re.findall("^error:", job.stderr, re.MULTILINE)) == 1
    assert ("Fatal Python error: Segmentation fault" in job.stderr) is ("SIGSEGV" in message)
    assert ('my_search.py", line 2 in <module>' in job.stderr) is ("SIGSEGV" in message)
    assert not (tmp_path / "run").exists()


def test_prepare_that_crashes_ends_run_with_message(mpi: Mpi, tmp_path: Path) -> None:
    text = (
        f"import os\nfrom hpo import Int, SearchSpace\n{START}\n\ndef prepare():\n    "
        "os.kill(os.getpid(), 11)\n"
    )
    (tmp_path / "my_search.py").write_text(text)
    job = mpi.run(2, PROGRAM, "my_search.py", "--run-dir", "run", cwd=tmp_path)
    assert (job.returncode, remove_loading_lines(job.stdout)) == (2, "")
    assert job.stderr.startswith("error: my_search.py: prepare: the trainer was ended by SIGSEGV")


def test_final_test_that_crashes_is_a_warning(mpi: Mpi, tmp_path: Path) -> None:
    text = "import os\nimport torch\nfrom hpo import Int, SearchSpace\n" + START.replace(
        "    return", "    worker.offer_weights({'weight': torch.ones(1)})\n    return"
    )
    text += "\n\ndef test(params, weights):\n    os.abort()\n"
    (tmp_path / "my_search.py").write_text(text)
    options = ["--islands", 1, "--evaluations", 2, "--run-dir", "run"]
    job = mpi.run(2, PROGRAM, "my_search.py", *options, cwd=tmp_path)
    assert job.returncode == 0
    assert (
        "warning: the best network could not be tested (the trainer was ended by SIGABRT"
        in job.stderr
    )
    assert (tmp_path / "run" / "report.html").exists()


def test_trainer_environment_lacks_launcher_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "a,b", "PATH": "/bin", "MPICH_ASYNC": "0"}
    kept["HYDRA_FULL_ERROR"] = "1"  # of the framework Hydra, which is not MPICH's launcher
    removed = [
        "PMI_RANK",
        "PMIX_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_STEP_ID",
        "HYDI_X",
    ]
    for name in list(os.environ):
        monkeypatch.delenv(name)
    for name, value in {**kept, **dict.fromkeys(removed, "1")}.items():
        monkeypatch.setenv(name, value)
    assert make_plain_environment() == {**kept, "PYTHONHASHSEED": "0"}


@pytest.mark.parametrize(("given", "seed"), [(None, "0"), ("random", "0"), ("7", "7")])
def test_template_environment_fixes_hash_seed(
    monkeypatch: pytest.MonkeyPatch, given: str | None, seed: str
) -> None:
    """Each host has its own template. So the templates must be given an equal hash seed."""
    if given is not None:
        monkeypatch.setenv("PYTHONHASHSEED", given)
    assert (
        make_plain_environment()["PYTHONHASHSEED"]
        == make_template_environment()["PYTHONHASHSEED"]
        == seed
    )
    code = [sys.executable, "-c", "print(list({'a', 'b', 'c', 'd', 'e', 'f'}))"]
    orders = {subprocess.check_output(code, env=make_template_environment()) for _ in range(3)}
    assert len(orders) == 1


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, True),
        ({"MPI_LOCALRANKID": "0"}, True),
        ({"MPI_LOCALRANKID": "1", "SLURM_LOCALID": "0"}, False),  # set by mpirun in a batch script
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "3"}, False),
        ({"SLURM_LOCALID": "0"}, True),
    ],
)
def test_first_rank_of_host_is_read_from_launcher(
    environment: dict[str, str], expected: bool
) -> None:
    assert is_first_on_host(environment) is expected
