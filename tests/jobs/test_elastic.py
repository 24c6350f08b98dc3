"""Test elastic workers (--elastic), which idle workers join, in MPI jobs that are also stopped and killed."""

from __future__ import annotations

import json
import math
import random
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hpo.errors import UsageError
from hpo.results.reader import RunReader
from hpo.store.elastic_candidates import estimate_losses_left, find_expandable, find_help_periods
from hpo.store.successive_halving import HALVING_SCHEDULES
from hpo.views.live.run_status import compute_run_status
from hpo.views.page.timeline import draw_timeline
from tests.support.chaos import Victim
from tests.support.evaluations import make_evaluation
from tests.support.launch import PROGRAM, PROGRAMS, SEARCHES, Mpi, run_hpo
from tests.support.run_output import load_trials
from tests.support.runs import start_session

LONG, SHORT = 1.0, 0.05
START = [{"x": LONG, "lr": 0.02}, {"x": SHORT, "lr": 0.03}]
EPOCHS = 14


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "start.json").write_text(json.dumps(START))
    return tmp_path


def make_growing_arguments(run_dir: str, *options: object, evaluations: int = 2, **settings: object) -> list[object]:
    """Return the arguments of a run whose first evaluation is long, and whose second evaluation is short."""
    chosen = {"epochs": EPOCHS, "seconds": 0.8, **settings}
    given = [option for name, value in chosen.items() for option in ("--set", f"{name}={value}")]
    search: list[object] = [PROGRAM, SEARCHES / "growing.py", "--run-dir", run_dir, "--enqueue", "start.json"]
    return [*search, "--evaluations", evaluations, "--islands", 1, *given, *options]


def read_curves(run_dir: Path) -> dict[float, list[float]]:
    """Return the losses of each individual, by its x. If it has several trials, those of the longest one."""
    found: dict[float, list[float]] = {}
    for trial in load_trials(run_dir):
        losses = list(trial.intermediate_values.values())
        found[trial.params["x"]] = max(found.get(trial.params["x"], []), losses, key=len)
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Mapping[float, list[float]]:
    """Return the losses of each individual, by its x, if one rank trains it."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "start.json").write_text(json.dumps(START))
    job = Mpi().run(1, *make_growing_arguments("alone", seconds=0), cwd=folder)
    assert (job.returncode, job.stderr) == (0, "")
    return read_curves(folder / "alone")


def assert_same(found: Mapping[float, list[float]], expected: Mapping[float, list[float]]) -> None:
    assert found.keys() == expected.keys()
    for x, losses in found.items():
        assert losses == pytest.approx(expected[x], rel=0, abs=1e-5)


def read_worker_groups(run_dir: Path) -> list[list[dict[str, Any]]]:
    return [trial.user_attrs.get("worker_groups", []) for trial in load_trials(run_dir)]


def test_helper_matching_sends_each_task_to_its_helpers(mpi: Mpi, tmp_path: Path) -> None:
    job = mpi.run(8, "-m", "mpi4py", PROGRAMS / "offering.py", 1, cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    lines = [json.loads(line) for line in job.stdout.splitlines()]
    sent = sorted(task for line in lines for task, workers in line["led"] for _ in range(workers))
    assert len(lines) == 8
    assert sent, "some worker was helped"
    assert sorted(task for line in lines for task in line["helped"]) == sent


def test_idle_worker_joins_evaluation_without_new_losses(
    each_mpi: Mpi, folder: Path, expected: Mapping[float, list[float]]
) -> None:
    job = each_mpi.run(
        4, *make_growing_arguments("run", "--ranks-per-worker", 2, "--elastic", folder=folder), cwd=folder
    )
    assert (job.returncode, job.stderr) == (0, "")
    assert_same(read_curves(folder / "run"), expected)
    (trial, other) = load_trials(folder / "run")
    worker = trial.user_attrs["worker"]
    (group,) = trial.user_attrs["worker_groups"]
    assert group["workers"] == [worker, other.user_attrs["worker"]]
    assert 2 <= group["after"] < EPOCHS
    assert trial.user_attrs["checkpoint_step"] >= group["after"], "it was moved through a file"
    assert not (folder / "run" / "checkpoints").exists()
    assert "2 complete, of 2; 1 with more than one worker\n" in job.stdout
    notes = [json.loads(line) for line in (folder / "epochs").read_text().splitlines()]
    for epoch in range(1, EPOCHS + 1):
        found = sorted((index, rank) for index, rank, _, x, trained in notes if (x, trained) == (LONG, epoch))
        size = 4 if epoch > group["after"] else 2
        assert found == [(worker, rank) for rank in range(size)], "each epoch is trained once, by all ranks"


def test_elastic_run_is_busier_and_shows_its_groups(mpi: Mpi, folder: Path) -> None:
    start = [{"x": x, "lr": 0.02 + x / 100} for x in (LONG, 0.05, 0.06, 0.07)]
    (folder / "start.json").write_text(json.dumps(start))
    options = ["--ranks-per-worker", 1]
    without = mpi.run(
        4, *make_growing_arguments("without", *options, evaluations=4, epochs=30, seconds=0.4), cwd=folder
    )
    job = mpi.run(
        4, *make_growing_arguments("run", *options, "--elastic", evaluations=4, epochs=30, seconds=0.4), cwd=folder
    )
    assert (job.returncode, job.stderr) == (without.returncode, without.stderr) == (0, "")
    assert_same(read_curves(folder / "run"), read_curves(folder / "without"))
    before, after = (json.loads((folder / name / "summary.json").read_text()) for name in ("without", "run"))
    assert before["worker_busy_fraction"] < after["worker_busy_fraction"] <= 1
    assert before["grown"] == 0
    assert after["grown"] == sum(map(bool, read_worker_groups(folder / "run"))) >= 1
    evaluation = RunReader(folder / "run").read_evaluations()[0]
    assert sorted(evaluation.workers) == [0, 1, 2, 3], "first two workers, and then four"
    assert evaluation.workers[0] == evaluation.worker
    shown = run_hpo("show", folder / "run", "0").stdout
    assert re.search(r"worker groups +after \d+ epochs: workers .* together", shown), shown
    figure = draw_timeline(RunReader(folder / "run").read_evaluations(), 4, None)
    assert figure is not None
    (helping,) = [trace for trace in figure.data if trace["name"] == "helping"]
    assert {lane for lane in helping["y"] if lane is not None} == {0, 1, 2, 3} - {evaluation.worker}


def test_run_status_shows_helping_worker(mpi: Mpi, folder: Path) -> None:
    command = make_growing_arguments("run", "--ranks-per-worker", 1, "--elastic", "--resume", epochs=60)
    victim = start_until_expanded(mpi, 2, command, folder)
    run = compute_run_status(RunReader(folder / "run").make_follower().take_snapshot())
    (running,) = run.running
    assert run.helper_texts == {1 - running.worker: f"helps worker {running.worker}"}
    assert run.idle_workers == [1 - running.worker]
    victim.job.send_signal(signal.SIGUSR1)
    assert victim.wait(30) == (75, "")


def start_until_expanded(mpi: Mpi, ranks: int, command: list[object], folder: Path) -> Victim:
    """Start a run, and wait until an evaluation has been given more workers and has then reported a loss."""
    known = len(read_worker_groups(folder / "run")) if (folder / "run" / "study.log").exists() else 0
    victim = Victim(mpi, ranks, command, folder, folder / f"log{ranks}")
    victim.wait_for(" on ")
    while True:
        trials = load_trials(folder / "run") if (folder / "run" / "study.log").exists() else []
        going = [t for t in trials if "worker_groups" in t.user_attrs and t.state.name == "RUNNING"]
        if any(len(t.intermediate_values) > t.user_attrs["worker_groups"][-1]["after"] for t in going):
            return victim
        assert victim.job.poll() is None, f"{known} {victim.log.read_text()}"
        victim.sleep(0.05)


def test_elastic_evaluation_resumes_after_stop_and_kill(
    mpi: Mpi, folder: Path, expected: Mapping[float, list[float]]
) -> None:
    command = make_growing_arguments(
        "run", "--ranks-per-worker", 1, "--elastic", "--resume", "--checkpoint-every", "1s", folder=folder
    )
    victim = start_until_expanded(mpi, 2, command, folder)
    victim.job.send_signal(signal.SIGUSR1)
    assert victim.wait(30) == (75, "")
    stopped = load_trials(folder / "run")
    victim = start_until_expanded(mpi, 4, command, folder)
    victim.kill("rank", random.Random(0))
    victim.wait(30)
    job = mpi.run(3, *command, "--set", "seconds=0", cwd=folder)
    assert (job.returncode, job.stderr) == (0, "")
    assert_same(read_curves(folder / "run"), expected)
    trials = load_trials(folder / "run")
    assert len(stopped[0].intermediate_values) == trials[2].user_attrs["resumed_from_step"]
    assert sum(map(bool, read_worker_groups(folder / "run"))) > 1
    assert json.loads((folder / "run" / "summary.json").read_text())["grown"] == 1, "of two individuals"
    notes = [json.loads(line) for line in (folder / "epochs").read_text().splitlines()]
    trained = [epoch for _, rank, _, x, epoch in notes if rank == 0 and x == LONG]
    assert len(trained) <= EPOCHS + 4, f"only epochs after the last checkpoint are repeated: {trained}"


def test_elastic_failure_continues_with_own_worker(
    mpi: Mpi, folder: Path, expected: Mapping[float, list[float]]
) -> None:
    # Each loss takes more than 1 s, so each checkpoint is written. By default, checkpoints are left out on busy cores.
    options = ["--ranks-per-worker", 1, "--elastic", "--checkpoint-every", "1s"]
    job = mpi.run(
        2, *make_growing_arguments("run", *options, most_ranks=1, fails_after=6, seconds=2.4, folder=folder), cwd=folder
    )
    assert job.returncode == 0, job.stderr
    expected_warning = (
        r"warning: --elastic: trial 0 continues with 1 worker, since it failed with 2: rank \d, growing.py:\d+: "
    )
    (line,) = job.stderr.splitlines()
    assert re.fullmatch(expected_warning + "ValueError: injected: no batch of 32 for 2 ranks", line), line
    assert_same(read_curves(folder / "run"), expected)
    first, second = read_worker_groups(folder / "run")[0]
    assert (len(first["workers"]), second["workers"]) == (2, first["workers"][:1])
    assert second["after"] == max(first["after"], 6), "no loss is lost"
    notes = [json.loads(line) for line in (folder / "epochs").read_text().splitlines()]
    trained = [epoch for _, rank, _, x, epoch in notes if rank == 0 and x == LONG]
    assert trained == list(range(1, EPOCHS + 1))


def test_elastic_without_gain_returns_to_own_worker(
    mpi: Mpi, folder: Path, expected: Mapping[float, list[float]]
) -> None:
    options = ["--ranks-per-worker", 1, "--elastic"]
    job = mpi.run(2, *make_growing_arguments("run", *options, scales=False, seconds=0.5), cwd=folder)
    assert (job.returncode, job.stderr) == (0, "")
    assert_same(read_curves(folder / "run"), expected)
    first, second = read_worker_groups(folder / "run")[0]
    assert second["workers"] == first["workers"][:1]
    assert second["after"] == first["after"] + 2, "two losses show it"


def test_elastic_without_checkpoints_warns_once(mpi: Mpi, folder: Path) -> None:
    options = ["--ranks-per-worker", 1, "--elastic"]
    job = mpi.run(2, *make_growing_arguments("run", *options, evaluations=6, saves=False, seconds=0.1), cwd=folder)
    expected = (
        r"warning: --elastic has no effect: trial \d+ has not called worker\.save_checkpoint\. Call it before .*\n"
    )
    assert job.returncode == 0
    assert re.fullmatch(expected, job.stderr), job.stderr
    assert read_worker_groups(folder / "run") == [[]] * 6


def test_elastic_with_restarting_objective_warns_once(
    mpi: Mpi, folder: Path, expected: Mapping[float, list[float]]
) -> None:
    options = ["--ranks-per-worker", 1, "--elastic"]
    job = mpi.run(2, *make_growing_arguments("run", *options, restores=False, seconds=0.6), cwd=folder)
    assert job.returncode == 0, job.stderr
    (line,) = job.stderr.splitlines()
    assert re.fullmatch(r"warning: --elastic: trial 0 has restarted with 2 workers: .* worker\.checkpoint", line), line
    assert_same(read_curves(folder / "run"), expected)


def test_elastic_confirmation_uses_more_workers(mpi: Mpi, folder: Path) -> None:
    options = ["--ranks-per-worker", 1, "--elastic", "--confirm-seeds", 1, "--top-n", 1]
    job = mpi.run(2, *make_growing_arguments("run", *options, evaluations=1, epochs=10), cwd=folder)
    assert (job.returncode, job.stderr) == (0, "")
    (confirmed,) = load_trials(folder / "run", "run-confirm")
    assert confirmed.state.name == "COMPLETE"
    assert confirmed.params["x"] == LONG
    assert len(confirmed.user_attrs["worker_groups"]) == 1


def test_elastic_promoted_evaluation_gets_helper_early(mpi: Mpi, folder: Path) -> None:
    best, others = {"x": 0.5, "lr": 0.1}, [{"x": 1 - number / 100, "lr": 0.01} for number in range(9)]
    (folder / "start.json").write_text(json.dumps([best, *others]))  # The best is first at each rung.
    options = ["--ranks-per-worker", 1, "--elastic", "--pruner", "asha"]
    job = mpi.run(3, *make_growing_arguments("run", *options, evaluations=10, epochs=18, seconds=1), cwd=folder)
    assert (job.returncode, job.stderr) == (0, "")
    trials = load_trials(folder / "run")
    last = max(t.datetime_start.timestamp() for t in trials if t.datetime_start)
    early = [group for groups in read_worker_groups(folder / "run") for group in groups if group["at"] < last]
    assert any(len(group["workers"]) == 2 for group in early), "a helper joins before the last evaluation starts"
    whole = mpi.run(2, *make_growing_arguments("whole", evaluations=10, epochs=18, seconds=0), cwd=folder)
    assert (whole.returncode, whole.stderr) == (0, "")
    whole_curves = read_curves(folder / "whole")
    for x, losses in read_curves(folder / "run").items():
        assert losses == pytest.approx(whole_curves[x][: len(losses)], rel=0, abs=1e-5)


def test_elastic_without_checkpoint_interval_is_refused(tmp_path: Path) -> None:
    message = "^--elastic and --checkpoint-every off exclude each other: more workers can join .* only at a checkpoint$"
    with pytest.raises(UsageError, match=message):
        start_session(tmp_path / "run", elastic=True, checkpoint_every=math.inf)
    assert not (tmp_path / "run").exists()


def test_estimate_losses_left_uses_longest_evaluation() -> None:
    whole = make_evaluation(0, curve=dict.fromkeys(range(1, 11), 1.0))
    assert estimate_losses_left([whole], 4) == 6
    assert estimate_losses_left([whole], 10) == 0
    assert estimate_losses_left([whole], 12) == 12, "it is the longest evaluation"
    assert estimate_losses_left([make_evaluation(0, "paused", curve={1: 1.0}, paused_after=1)], 4) == 4


@pytest.mark.parametrize(
    ("losses", "workers", "is_promising"),
    [
        (1, 1, False),
        (2, 1, False),
        (4, 1, True),
        (5, 1, True),
        (6, 1, False),
        (4, 4, False),
        (4, 2, True),
        (12, 2, True),
    ],
)
def test_find_expandable_checks_losses_and_workers(losses: int, workers: int, is_promising: bool) -> None:
    groups = [{"workers": list(range(workers)), "after": 2, "at": 1.0}] if workers > 1 else []
    whole = make_evaluation(0, curve=dict.fromkeys(range(1, 28), 1.0))
    running = make_evaluation(1, "running", curve=dict.fromkeys(range(1, losses + 1), 1.0), worker_groups=groups)
    found = find_expandable(HALVING_SCHEDULES["asha"], [whole, running], now=1.0 + 3.0 * losses)
    assert [(p.trial, p.worker, p.max_wait) for p in found] == ([(1, 0, 3.0)] if is_promising else [])


def test_find_expandable_skips_promoted_without_new_loss() -> None:
    paused = make_evaluation(0, "promoted", curve={1: 1.0, 2: 1.0, 3: 1.0}, paused_after=3)
    again = make_evaluation(1, "running", curve=paused.curve, retry_of=0, resumed_from_step=3)
    assert find_expandable(HALVING_SCHEDULES["asha"], [paused, again], now=9.0) == []


def test_find_help_periods_splits_by_worker_and_group() -> None:
    groups = [
        {"workers": [2, 1], "after": 3, "at": 10.0},
        {"workers": [2, 1, 0, 3], "after": 5, "at": 14.0},
        {"workers": [2], "after": 7, "at": 15.0},
    ]
    evaluation = make_evaluation(0, worker=2, worker_groups=groups)
    spans = [(part.worker, part.start, part.stop, part.from_step) for part in find_help_periods(evaluation, 20.0)]
    assert spans == [(1, 10, 14, 3), (1, 14, 15, 5), (0, 14, 15, 5), (3, 14, 15, 5)]
    assert evaluation.workers == [2]
    interrupted = find_help_periods(evaluation, 12.0)
    assert [(part.worker, part.start, part.stop) for part in interrupted] == [(1, 10, 12)], (
        "later groups have not begun"
    )
    figure = draw_timeline([make_evaluation(0, worker=0, worker_groups=groups[:2])], 1, None)
    assert figure is not None
    assert figure.layout["yaxis"]["range"][0] > 3, "an earlier session had more workers"
    assert find_help_periods(make_evaluation(0), math.inf) == []
