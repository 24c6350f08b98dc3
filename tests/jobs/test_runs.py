"""Test whole runs of run_islands.py, started as a user starts them."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import optuna
import pytest

from hpo.cli.command_line import call_app, run_command
from hpo.cli.mpi_commands import make_command_app, make_search
from hpo.errors import UsageError
from hpo.layout import Layout
from hpo.options import Options
from hpo.run.resolve_options import resolve_options
from tests.support.chaos import Victim, kill_at_end, list_open_files
from tests.support.launch import (
    ALONE,
    FASHION_MNIST,
    HPO,
    PROGRAM,
    ROOT,
    SEARCHES,
    Mpi,
    list_available_mpis,
    make_hpo_command,
    needs_fashion_mnist,
    run_hpo,
    wait_for_job,
)
from tests.support.limits import scale
from tests.support.run_output import (
    find_complete_losses,
    load_trials,
    parse_lines,
    remove_loading_lines,
)
from tests.support.runs import QUICK, start_session


def test_hpo_search_is_the_same_command(mpi: Mpi, tmp_path: Path) -> None:
    hpo = [*HPO, "search"]
    job = mpi.run(
        4, *hpo, SEARCHES / "tiny.py", "--evaluations", 3, "--run-dir", "run", cwd=tmp_path
    )
    assert job.returncode == 0, job.stderr
    assert len(load_trials(tmp_path / "run")) == 3
    command = json.loads((tmp_path / "run" / "run.json").read_text())["command"]
    assert command == f"hpo search {SEARCHES / 'tiny.py'} --evaluations 3 --run-dir run"
    listed = run_hpo("--help").stdout
    assert "search" in listed.split("Commands:")[1]


def test_the_default_search_on_8_ranks(mpi: Mpi, tmp_path: Path) -> None:
    options = ["--evaluations", 13, "--set", "epochs=2", "--seed", 3, "--top-n", 2]
    with kill_at_end(Victim(mpi, 8, [PROGRAM, *options], tmp_path, tmp_path / "log")) as victim:
        assert victim.wait_for(" 2/13 ")
        ranks = victim.find_ranks()
        assert (len(ranks), len(victim.find_templates())) == (8, 1)
        for number, rank in enumerate(ranks):
            memory = re.findall(
                r"^VmRSS:\s+(\d+) kB$", Path(f"/proc/{rank}/status").read_text(), re.MULTILINE
            )
            assert int(memory[0]) < 160 * 1024
            maps = Path(f"/proc/{rank}/maps").read_text()
            assert "libtorch" not in maps, "Ranks must not import torch."
            assert ("numpy" in maps) is (number % 2 == 0), "Only leaders of workers import numpy."
        received = [name for rank in ranks for name in list_open_files(rank) if "changes" in name]
        assert len(received) == 4
        assert len(set(received)) == 1, "Leaders of a host share the changes that they receive."
        assert victim.wait(100) == (0, "")
    printed = (tmp_path / "log").read_text()
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert run_dir.name.startswith("digits_cnn-")

    lines = parse_lines(printed)
    assert [(line["done"], line["budget"]) for line in lines] == [
        (str(n), "13") for n in range(1, 14)
    ]
    assert {line["worker"] for line in lines} == set("0123")
    assert all((line["island"] == "0") == (line["worker"] in "01") for line in lines)
    params = re.compile(r"conv_layers=\d +activation=\w+ +lr=\S+ +gamma=\S+ +accuracy=\S+$")
    assert all(params.match(line["params"]) for line in lines)
    best = min(float(line["loss"]) for line in lines)
    assert [float(line["loss"]) for line in lines if line["best"]][-1] == best

    trials = load_trials(run_dir)
    assert Counter(trial.state.name for trial in trials) == {"COMPLETE": 13}
    for trial in trials:
        assert list(trial.intermediate_values) == [1, 2]
        assert trial.values == [min(trial.intermediate_values.values())]
        assert 0 <= trial.user_attrs["metrics"]["accuracy"] <= 1
    for worker in range(4):
        generations = [
            t.user_attrs["generation"] for t in trials if t.user_attrs["worker"] == worker
        ]
        assert generations == list(range(len(generations)))

    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["evaluations"] == {
        "complete": 13,
        "pruned": 0,
        "paused": 0,
        "failed": 0,
        "running": 0,
        "budget": 13,
    }
    assert (
        summary["best"]["loss"]
        == min(find_complete_losses(trials).values())
        == pytest.approx(best, rel=1e-3)
    )
    assert [island["island"] for island in summary["islands"]] == [0, 1]
    assert all(len(island["top"]) == 2 for island in summary["islands"])
    assert 0.3 < summary["worker_busy_fraction"] <= 1
    assert f"{summary['best']['loss']:.4g}" in printed.split("All islands")[1]
    assert printed.splitlines()[-1] == f"The report is {run_dir.relative_to(tmp_path)}/report.html"
    assert f"<title>{run_dir.name}: loss {best:.4g}</title>" in (run_dir / "report.html").read_text(
        "utf-8"
    )
    run = json.loads((run_dir / "run.json").read_text())
    assert (run["budget"], run["seed"], run["settings"]["epochs"], len(run["hosts"])) == (
        13,
        3,
        2,
        1,
    )
    assert run["space"]["conv_layers"] == "Int(1, 6)"

    top = make_hpo_command("top", run_dir, "-n", 1)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    as_json = subprocess.run(
        [*top, "--json"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=scale(60),
    )
    assert json.loads(as_json.stdout)["top"] == [summary["best"]]
    table = subprocess.run(
        top, env=environment, capture_output=True, text=True, check=True, timeout=scale(60)
    )
    assert "13 complete, of 13" in table.stdout


def test_run_evaluates_no_individual_twice_even_if_resumed(mpi: Mpi, tmp_path: Path) -> None:
    arguments = [PROGRAM, SEARCHES / "tiny.py", "--run-dir", "run", "--evaluations", 4]
    job = mpi.run(4, *arguments, "--propagators", "ga,tpe", cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    assert "2 islands, 1 host, on CPUs; ga, tpe; seed 0" in job.stdout
    job = mpi.run(2, *arguments[:-1], 64, "--ranks-per-worker", 1, "--resume", cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    assert "; ga, tpe; seed 0" in job.stdout, "The propagators must be kept."
    assert "5 complete, 1 failed, of 64" in job.stdout
    assert (
        "The search space is exhausted: it has 6 individuals, and all were evaluated" in job.stdout
    )
    trials = load_trials(tmp_path / "run")
    assert len({tuple(trial.params.values()) for trial in trials}) == len(trials) == 6
    assert {(t.user_attrs["island"], t.user_attrs["propagator"]) for t in trials} == {
        (0, "ga"),
        (1, "tpe"),
    }
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["exhausted"], summary["stopped"], summary["best"]["loss"]) == (True, None, 1.0)
    assert sum(entry["evaluations"] for entry in summary["propagators"]) == 6
    assert {entry["propagator"] for entry in summary["propagators"]} == {"ga", "tpe"}


def test_run_with_enqueue_evaluates_these_first(
    mpi: Mpi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enqueued = [{"depth": 3, "act": "tanh"}, {"act": "relu"}, {"depth": 3, "act": "tanh"}]
    (tmp_path / "given.json").write_text(json.dumps(enqueued))
    arguments = [PROGRAM, SEARCHES / "tiny.py", "--run-dir", "run", "--enqueue", "given.json"]
    for ranks, evaluations, options in ((4, 4, []), (1, 6, ["--resume", *ALONE])):
        job = mpi.run(ranks, *arguments, "--evaluations", evaluations, *options, cwd=tmp_path)
        assert (job.returncode, job.stderr) == (0, "")
        trials = load_trials(tmp_path / "run")
        assert len({tuple(trial.params.values()) for trial in trials}) == len(trials) == evaluations
        assert (trials[0].params, trials[1].params["act"]) == (enqueued[0], "relu")
        assert [trial.user_attrs["propagator"] for trial in trials] == ["--enqueue"] * 2 + [
            "ga"
        ] * (evaluations - 2)
    monkeypatch.chdir(tmp_path)
    Path("given.json").write_text('[{"depth": 3}, {"depth": 4}]')
    with pytest.raises(
        UsageError,
        match=r"^--enqueue given\.json: entry 2: parameter 'depth' must be in Int\(1, 3\), got 4",
    ):
        start_session(Path("run"), SEARCHES / "tiny.py", resume=True, enqueue="given.json")


def test_run_with_reached_target_stops_on_all_ranks(mpi: Mpi, tmp_path: Path) -> None:
    settings = ["--set", "epochs=1000", "--set", "seconds=0.1"]
    arguments = [PROGRAM, QUICK, "--run-dir", "run", *settings, "--target-loss", "2.5e3"]
    job = mpi.run(4, *arguments, cwd=tmp_path, timeout=60)  # one evaluation would take 100 s
    assert (job.returncode, job.stderr) == (0, "")
    stopped = (
        "Stopped: the loss of --target-loss 2500 is reached. To resume: the same command with "
        "--run-dir run --resume and a lower --target-loss, or --target-loss off\n"
    )
    assert stopped in job.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["evaluations"]["complete"] >= 1
    assert summary["evaluations"]["complete"] + summary["waiting"] == 2
    trials = load_trials(tmp_path / "run")
    complete = [trial for trial in trials if trial.state.name == "COMPLETE"]
    assert all(len(trial.intermediate_values) == 1 for trial in complete)
    again = mpi.run(1, *arguments, *ALONE, "--resume", cwd=tmp_path, timeout=60)
    assert (again.returncode, again.stderr) == (0, "")
    assert len(load_trials(tmp_path / "run")) == len(trials), "The target is already reached."


@pytest.mark.parametrize(
    ("ranks", "options", "budget", "workers_of_island"),
    [
        (6, ["--ranks-per-worker", 3, "--islands", 2, "--evaluations", 7], 7, {0: {0}, 1: {1}}),
        (3, ["--generations", 4, "--migration"], 12, {0: {0, 1}, 1: {2}}),
        (
            2,
            ["--ranks-per-worker", 1, "--migration-probability", 1, "--evaluations", 40],
            40,
            {0: {0}, 1: {1}},
        ),
        (1, ["--migration", "--migration-probability", 1, "--evaluations", 3], 3, {0: {0}}),
        (3, ["--propagators", "ga,tpe,random", "--evaluations", 40], 40, {0: {0}, 1: {1}, 2: {2}}),
    ],
    ids=["workers-of-3", "3-ranks", "islands-of-1", "one-island", "island-for-each-propagator"],
)
def test_run_with_any_layout_spends_exactly_its_budget(
    mpi: Mpi,
    tmp_path: Path,
    ranks: int,
    options: list[object],
    budget: int,
    workers_of_island: dict[int, set[int]],
) -> None:
    job = mpi.run(
        ranks,
        PROGRAM,
        QUICK,
        *options,
        "--set",
        "seconds=0.02",
        "--run-dir",
        "here/run",
        cwd=tmp_path,
    )
    assert (job.returncode, job.stderr) == (0, "")
    trials = load_trials(tmp_path / "here" / "run")
    assert [trial.number for trial in trials] == list(range(budget))
    assert len(find_complete_losses(trials)) == budget == len(parse_lines(job.stdout))
    workers: dict[int, set[int]] = {}
    for trial in trials:
        workers.setdefault(trial.user_attrs["island"], set()).add(trial.user_attrs["worker"])
    assert workers == workers_of_island


def test_runs_at_the_same_time_have_separate_directories(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "runs" / "quick").mkdir(parents=True)
    (tmp_path / "runs" / "quick" / "run.json").touch()  # It does not get in their way.
    options = [*ALONE, "--evaluations", 8, "--set", "seconds=0.1"]
    jobs = [mpi.start(1, PROGRAM, QUICK, *options, cwd=tmp_path) for _ in range(2)]
    for job in [wait_for_job(job) for job in jobs]:
        assert (job.returncode, job.stderr) == (0, "")
    run_dirs = list((tmp_path / "runs").glob("quick-*"))
    assert len(run_dirs) == 2
    assert [len(find_complete_losses(load_trials(run_dir))) for run_dir in run_dirs] == [8, 8]


_UNPICKLED = (
    "'TextIOWrapper' instances" if sys.version_info >= (3, 13) else "'_io.TextIOWrapper' object"
)
OPENED = (
    "prepare must return data that can be copied for each evaluation, got TypeError: cannot "
    f"pickle {_UNPICKLED}. Return arrays, tensors and plain values, and open files in the "
    "objective"
)


def list_running(run_dir: Path) -> list[optuna.trial.FrozenTrial]:
    """Return the running trials of a run."""
    return [
        trial for trial in load_trials(run_dir) if trial.state == optuna.trial.TrialState.RUNNING
    ]


def kill_after(job: subprocess.Popen[str], evaluations: int, log: Path) -> None:
    """Kill all processes of a job at once, after it has reported `evaluations`."""
    deadline = time.monotonic() + scale(60)
    while (
        len(parse_lines(log.read_text())) < evaluations
        and time.monotonic() < deadline
        and job.poll() is None
    ):
        time.sleep(0.02)
    ended = len(find_complete_losses(load_trials(log.parent / "run")))
    # All workers may end at the same time: wait until they have begun again.
    while (
        len(find_complete_losses(load_trials(log.parent / "run"))) == ended
        and time.monotonic() < deadline
    ):
        time.sleep(0.02)
    while not list_running(log.parent / "run") and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(job.pid, signal.SIGKILL)
    job.communicate(timeout=scale(30))


def test_killed_run_is_resumed_in_another_layout(mpi: Mpi, tmp_path: Path) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    options = [
        PROGRAM,
        QUICK,
        "--run-dir",
        run_dir,
        "--resume",
        "--set",
        "seconds=0.4",
        "--seed",
        5,
    ]
    with log.open("w") as out:
        job = mpi.start(4, *options, "--evaluations", 14, cwd=tmp_path, stdout=out.fileno())
    kill_after(job, 5, log)
    before = find_complete_losses(load_trials(run_dir))
    assert 5 <= len(before) < 14
    in_flight = list_running(run_dir)
    assert in_flight

    layout = ["--islands", 3, "--ranks-per-worker", 1]
    job_again = mpi.run(3, *options, "--evaluations", 20, *layout, cwd=tmp_path)
    assert (job_again.returncode, job_again.stderr) == (0, "")
    found = f"{len(before)} evaluations; {len(in_flight)} waiting will run, a few at a time"
    assert f"resumed after {found}" in job_again.stdout
    trials = load_trials(run_dir)
    after = find_complete_losses(trials)
    assert {number: after[number] for number in before} == before
    assert len(after) == 20
    interrupted = [t for t in trials if t.user_attrs.get("failure") == "interrupted"]
    assert [t.number for t in interrupted] == [t.number for t in in_flight]
    retries = {t.user_attrs["retry_of"]: t for t in trials if "retry_of" in t.user_attrs}
    assert {n: retries[n].params for n in retries} == {t.number: t.params for t in in_flight}
    started = sorted(
        (t for t in trials if t.number > in_flight[-1].number), key=lambda t: t.datetime_start or 0
    )
    # One of them may have crashed the job, so they are retried one at a time.
    assert min(t.number for t in retries.values()) in {t.number for t in started[:3]}
    workers = [
        (t.user_attrs["worker"], t.user_attrs["generation"]) for t in trials if t.number in after
    ]
    assert len(set(workers)) == len(workers), "Generations must continue to count."

    name = socket.gethostname()
    last_before = in_flight[-1].number
    for trial in trials:
        # Workers had two ranks before, and have one now.
        assert trial.user_attrs["hosts"] == {name: 2 if trial.number <= last_before else 1}
        assert "gpus" not in trial.user_attrs

    assert [line["done"] for line in parse_lines(job_again.stdout)] == [
        str(n) for n in range(len(before) + 1, 21)
    ]
    assert {t.user_attrs["island"] for t in trials[-6:]} == {0, 1, 2}

    moved = run_dir.rename(tmp_path / "moved")
    # As a process that is killed during a write leaves it.
    (moved / "study.log.lock").symlink_to(moved / "study.log")
    options[options.index(run_dir)] = run_dir = moved
    again = mpi.run(1, *options, *ALONE, "--evaluations", 21, "--set", "epochs=1", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "epochs was 2 before, and is 1 now: losses may not be comparable" in again.stdout
    assert json.loads((run_dir / "run.json").read_text())["set"] == {
        "seconds": "0.4",
        "epochs": "1",
    }

    other = tmp_path / "other.py"
    other.write_text(QUICK.read_text().replace("depth=Int(1, 9)", "depth=Int(1, 8)"))
    with pytest.raises(UsageError, match=re.escape("'depth' was Int(1, 9), and is Int(1, 8)")):
        start_session(run_dir, other, resume=True)
    assert len(find_complete_losses(load_trials(run_dir, "run"))) == 21


@needs_fashion_mnist
def test_mnist_cnn_runs_on_fashion_mnist_with_sqlite(mpi: Mpi, tmp_path: Path) -> None:
    settings = [
        "dataset=fashion-mnist",
        f"data_dir={FASHION_MNIST}",
        "epochs=1",
        "train_samples=300",
    ]
    options = [
        option for setting in [*settings, "validation_samples=99"] for option in ("--set", setting)
    ]
    storage = f"sqlite:///{tmp_path}/study.db"
    command = [
        PROGRAM,
        ROOT / "search_spaces" / "mnist_cnn.py",
        "--evaluations",
        2,
        "--storage",
        storage,
    ]
    job = mpi.run(
        2, *command, *options, "--islands", 1, "--run-dir", tmp_path / "run", cwd=tmp_path
    )
    assert (job.returncode, job.stderr) == (0, "")
    study = optuna.load_study(study_name="run", storage=storage)
    assert len(find_complete_losses(study.trials)) == 2
    assert all(1.0 < loss < 3.0 for loss in find_complete_losses(study.trials).values())
    assert not (tmp_path / "run" / "study.log").exists()


def test_run_with_missing_data_prints_one_message_first(
    mpi: Mpi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # no network on any machine
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    options = ["--ranks-per-worker", 1, "--set", "data_dir=nowhere"]
    job = mpi.run(2, PROGRAM, ROOT / "search_spaces" / "mnist_cnn.py", *options, cwd=tmp_path)
    assert (job.returncode, remove_loading_lines(job.stdout)) == (2, "")
    assert job.stderr.count("error:") == 1
    assert (
        f"train-images-idx3-ubyte[.gz] and train-labels-idx1-ubyte[.gz] in {tmp_path}/nowhere"
        in job.stderr
    )
    assert "--set data_dir=FOLDER" in job.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("ranks", "arguments", "message"),
    [
        (3, ["--evalutions", "3"], "No such option: --evalutions"),
        (1, ["--set", "epoch=3"], "no setting 'epoch'; did you mean epochs?"),
        (2, ["raising.py"], "ZeroDivisionError: division by zero"),
        (1, ["opening.py"], OPENED),
        (3, ["--islands", "4"], "--islands 4 is more than the 3 workers"),
        (
            2,
            ["--run-dir", "used"],
            "used already holds a run: add --resume to continue it, or name another",
        ),
        (
            2,
            ["--storage", "sqlite:////nowhere/study.db", "--run-dir", "new"],
            "the storage sqlite:////nowhere/stu",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_run_with_mistake_prints_one_message_on_one_rank(
    mpi: Mpi, tmp_path: Path, ranks: int, arguments: list[str], message: str
) -> None:
    (tmp_path / "raising.py").write_text("space = 1 / 0\n")
    opening = (
        f"{(SEARCHES / 'smooth.py').read_text()}\n\ndef prepare(*_):\n    return open(__file__)\n"
    )
    (tmp_path / "opening.py").write_text(opening)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "study.log").write_text("mine")
    search = [] if arguments[0].endswith(".py") else [QUICK]
    before = sorted(tmp_path.rglob("*"))
    job = mpi.run(ranks, PROGRAM, *search, *ALONE, *arguments, cwd=tmp_path)
    assert (job.returncode, remove_loading_lines(job.stdout)) == (2, "")
    assert job.stderr.startswith("error: ")
    assert job.stderr.count(message) == 1
    assert job.stderr.count("error: ") == 1
    assert [
        path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in path.parts
    ] == before
    assert (tmp_path / "used" / "study.log").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing argument 'SEARCH_SPACE' (see hpo search --help)"),
        (
            [QUICK, "--evaluations", "many"],
            "'--evaluations': must be a whole number, got 'many' (see hpo search --help)",
        ),
        (
            [QUICK, "--evaluations", "0"],
            "--evaluations must be at least 1 and less than 2**63, got 0",
        ),
        (
            [QUICK, "--evaluations", "3", "--generations", "2"],
            "--evaluations and --generations exclude each other",
        ),
        (
            [QUICK, "--migration-probability", "often"],
            "'--migration-probability': must be a number, got 'often' (see hpo search --help)",
        ),
    ],
    ids=lambda value: " ".join(map(str, value[1:])) if isinstance(value, list) else "",
)
def test_command_line_with_mistake_prints_one_message(
    capsys: pytest.CaptureFixture[str], arguments: list[object], message: str
) -> None:
    app = make_command_app(make_search())

    def parse() -> tuple[Options, Layout]:
        return resolve_options(call_app(app, "hpo search", list(map(str, arguments))), ranks=4)

    assert run_command(parse, "hpo search") == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_resume_in_directory_with_foreign_study_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("used").mkdir()
    Path("used", "study.log").write_text("mine")
    with pytest.raises(
        UsageError, match=r"^used/study\.log is not the study of a run\. Give another --run-dir"
    ):
        start_session(Path("used"), resume=True)
    assert Path("used", "study.log").read_text() == "mine"


@pytest.mark.mpi
def test_launcher_of_another_mpi_is_refused(tmp_path: Path) -> None:
    another = [mpi for mpi in list_available_mpis() if mpi.python != Mpi().python]
    if not another:
        pytest.skip("no second MPI: make open-mpi")
    job = Mpi(python=another[0].python).launch(2, PROGRAM, QUICK, cwd=tmp_path)
    assert (job.returncode, remove_loading_lines(job.stdout)) == (2, "")
    assert job.stderr.count("error: 2 ranks were started (PMI_SIZE=2), and mpi4py finds 1") == 1
    assert not (tmp_path / "runs").exists()


def test_help_of_run_islands_has_each_option(mpi: Mpi, tmp_path: Path) -> None:
    job = mpi.run(1, PROGRAM, "--help", cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    options = """SEARCH_SPACE --evaluations --generations --islands --ranks-per-worker
    --migration-probability --pollination --migration --seed --run-dir --resume --top-n --set
    --storage --log-level --help"""
    assert [option for option in re.findall(r"\S+", options) if option not in job.stdout] == []
    assert "mpirun -n 8 python run_islands.py" in job.stdout


# A shell starts background processes, such as these tests, with an ignored SIGINT.
IN_TERMINAL = (
    "import pty, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); pty.spawn(sys.argv[1:])"
)


@pytest.mark.mpi
def test_tee_that_ctrl_c_would_end_is_named(tmp_path: Path) -> None:
    run = shlex.join(Mpi().make_command(1, PROGRAM, QUICK, "--evaluations", 1))
    for command, is_named in ((f"{run} 2>&1 | tee log", True), (f"{run} 2>&1 | tee -i log", False)):
        ended = subprocess.run(
            [sys.executable, "-c", IN_TERMINAL, "bash", "-c", command],
            cwd=tmp_path,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            check=True,
            timeout=scale(60),
        )
        assert "1 complete, of 1" in ended.stdout
        assert ("Use tee -i instead" in ended.stdout) is is_named
