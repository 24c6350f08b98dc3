"""Workers that join others in their evaluations (--elastic): on real jobs, also where these are stopped and die."""

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


def growing(run_dir: str, *options: object, evaluations: int = 2, **settings: object) -> list[object]:
    """Return the arguments of a run whose first evaluation takes long, and whose second does not."""
    chosen = {"epochs": EPOCHS, "seconds": 0.8, **settings}
    given = [option for name, value in chosen.items() for option in ("--set", f"{name}={value}")]
    search: list[object] = [PROGRAM, SEARCHES / "growing.py", "--run-dir", run_dir, "--enqueue", "start.json"]
    return [*search, "--evaluations", evaluations, "--islands", 1, *given, *options]


def curves(run_dir: Path) -> dict[float, list[float]]:
    """Return the losses of individuals, the longest curve of each."""
    found: dict[float, list[float]] = {}
    for trial in load_trials(run_dir):
        losses = list(trial.intermediate_values.values())
        found[trial.params["x"]] = max(found.get(trial.params["x"], []), losses, key=len)
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Mapping[float, list[float]]:
    """Return the losses of the individuals, each trained by one rank."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "start.json").write_text(json.dumps(START))
    job = Mpi().run(1, *growing("alone", seconds=0), cwd=folder)
    assert (job.returncode, job.stderr) == (0, "")
    return curves(folder / "alone")


def assert_same(found: Mapping[float, list[float]], expected: Mapping[float, list[float]]) -> None:
    assert found.keys() == expected.keys()
    for x, losses in found.items():
        assert losses == pytest.approx(expected[x], rel=0, abs=1e-5)


def teams_of(run_dir: Path) -> list[list[dict[str, Any]]]:
    return [trial.user_attrs.get("worker_groups", []) for trial in load_trials(run_dir)]


def test_offers_are_kept_and_nobody_waits_for_ever(mpi: Mpi, tmp_path: Path) -> None:
    job = mpi.run(8, "-m", "mpi4py", PROGRAMS / "offering.py", 1, cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    lines = [json.loads(line) for line in job.stdout.splitlines()]
    wanted = sorted(what for line in lines for what, workers in line["led"] for _ in range(workers))
    assert len(lines) == 8
    assert wanted, "somebody was helped"
    assert sorted(what for line in lines for what in line["helped"]) == wanted


def test_a_worker_without_work_joins_another_and_losses_stay(
    each_mpi: Mpi, folder: Path, expected: Mapping[float, list[float]]
) -> None:
    job = each_mpi.run(4, *growing("run", "--ranks-per-worker", 2, "--elastic", folder=folder), cwd=folder)
    assert (job.returncode, job.stderr) == (0, "")
    assert_same(curves(folder / "run"), expected)
    (trial, other) = load_trials(folder / "run")
    worker = trial.user_attrs["worker"]
    (team,) = trial.user_attrs["worker_groups"]
    assert team["workers"] == [worker, other.user_attrs["worker"]]
    assert 2 <= team["after"] < EPOCHS
    assert trial.user_attrs["checkpoint_step"] >= team["after"], "it was handed on through a file"
    assert not (folder / "run" / "checkpoints").exists()
    assert "2 complete, of 2; 1 with more than one worker\n" in job.stdout
    notes = [json.loads(line) for line in (folder / "epochs").read_text().splitlines()]
    for epoch in range(1, EPOCHS + 1):
        there = sorted((index, rank) for index, rank, _, x, trained in notes if (x, trained) == (LONG, epoch))
        size = 4 if epoch > team["after"] else 2
        assert there == [(worker, rank) for rank in range(size)], "each epoch is trained once, by all ranks"


def test_growing_and_what_it_is_seen_by(mpi: Mpi, folder: Path) -> None:
    start = [{"x": x, "lr": 0.02 + x / 100} for x in (LONG, 0.05, 0.06, 0.07)]
    (folder / "start.json").write_text(json.dumps(start))
    options = ["--ranks-per-worker", 1]
    without = mpi.run(4, *growing("without", *options, evaluations=4, epochs=30, seconds=0.2), cwd=folder)
    job = mpi.run(4, *growing("run", *options, "--elastic", evaluations=4, epochs=30, seconds=0.4), cwd=folder)
    assert (job.returncode, job.stderr) == (without.returncode, without.stderr) == (0, "")
    assert_same(curves(folder / "run"), curves(folder / "without"))
    before, after = (json.loads((folder / name / "summary.json").read_text()) for name in ("without", "run"))
    assert before["worker_busy_fraction"] < 0.5 < after["worker_busy_fraction"] <= 1
    assert before["grown"] == 0
    assert after["grown"] == sum(map(bool, teams_of(folder / "run"))) >= 1
    evaluation = RunReader(folder / "run").read_evaluations()[0]
    assert sorted(evaluation.workers) == [0, 1, 2, 3], "two, and then four"
    assert evaluation.workers[0] == evaluation.worker
    shown = run_hpo("show", folder / "run", "0").stdout
    assert re.search(r"teams +after \d+ epochs: workers .* together", shown), shown
    figure = draw_timeline(RunReader(folder / "run").read_evaluations(), 4, None)
    assert figure is not None
    (helping,) = [trace for trace in figure.data if trace["name"] == "helping"]
    assert {lane for lane in helping["y"] if lane is not None} == {0, 1, 2, 3} - {evaluation.worker}


def test_a_worker_that_helps_is_seen_while_it_does(mpi: Mpi, folder: Path) -> None:
    command = growing("run", "--ranks-per-worker", 1, "--elastic", "--resume", epochs=60)
    victim = grown(mpi, 2, command, folder)
    run = compute_run_status(RunReader(folder / "run").make_follower().take_snapshot())
    (running,) = run.running
    assert run.helper_texts == {1 - running.worker: f"helps worker {running.worker}"}
    assert run.idle_workers == [1 - running.worker]
    victim.job.send_signal(signal.SIGUSR1)
    assert victim.wait(30) == (75, "")


def grown(mpi: Mpi, ranks: int, command: list[object], folder: Path) -> Victim:
    """Start a run, and wait until its evaluation has grown, and has had a loss since then."""
    known = len(teams_of(folder / "run")) if (folder / "run" / "study.log").exists() else 0
    victim = Victim(mpi, ranks, command, folder, folder / f"log{ranks}")
    victim.wait_for(" on ")
    while True:
        trials = load_trials(folder / "run") if (folder / "run" / "study.log").exists() else []
        going = [t for t in trials if "worker_groups" in t.user_attrs and t.state.name == "RUNNING"]
        if any(len(t.intermediate_values) > t.user_attrs["worker_groups"][-1]["after"] for t in going):
            return victim
        assert victim.job.poll() is None, f"{known} {victim.log.read_text()}"
        victim.sleep(0.05)


def test_what_has_grown_goes_on_after_a_stop_and_a_death(
    mpi: Mpi, folder: Path, expected: Mapping[float, list[float]]
) -> None:
    command = growing(
        "run", "--ranks-per-worker", 1, "--elastic", "--resume", "--checkpoint-every", "1s", folder=folder
    )
    victim = grown(mpi, 2, command, folder)
    victim.job.send_signal(signal.SIGUSR1)
    assert victim.wait(30) == (75, "")
    stopped = load_trials(folder / "run")
    victim = grown(mpi, 4, command, folder)
    victim.kill("rank", random.Random(0))
    victim.wait(30)
    job = mpi.run(3, *command, "--set", "seconds=0", cwd=folder)
    assert (job.returncode, job.stderr) == (0, "")
    assert_same(curves(folder / "run"), expected)
    trials = load_trials(folder / "run")
    assert len(stopped[0].intermediate_values) == trials[2].user_attrs["resumed_from_step"]
    assert sum(map(bool, teams_of(folder / "run"))) > 1
    assert json.loads((folder / "run" / "summary.json").read_text())["grown"] == 1, "of two individuals"
    notes = [json.loads(line) for line in (folder / "epochs").read_text().splitlines()]
    trained = [epoch for _, rank, _, x, epoch in notes if rank == 0 and x == LONG]
    assert len(trained) <= EPOCHS + 4, f"at most what the kill has cost: {trained}"


def test_an_evaluation_that_cannot_have_more_ranks_goes_on_with_its_own(
    mpi: Mpi, folder: Path, expected: Mapping[float, list[float]]
) -> None:
    options = ["--ranks-per-worker", 1, "--elastic"]
    job = mpi.run(2, *growing("run", *options, most_ranks=1, fails_after=6, seconds=1.2, folder=folder), cwd=folder)
    assert job.returncode == 0, job.stderr
    said = r"warning: --elastic: trial 0 goes on with 1 worker, since it could not with 2: rank \d, growing.py:\d+: "
    (line,) = job.stderr.splitlines()
    assert re.fullmatch(said + "ValueError: injected: no batch of 32 for 2 ranks", line), line
    assert_same(curves(folder / "run"), expected)
    there, back = teams_of(folder / "run")[0]
    assert (len(there["workers"]), back["workers"]) == (2, there["workers"][:1])
    assert back["after"] == max(there["after"], 6), "nothing is lost"
    notes = [json.loads(line) for line in (folder / "epochs").read_text().splitlines()]
    trained = [epoch for _, rank, _, x, epoch in notes if rank == 0 and x == LONG]
    assert trained == list(range(1, EPOCHS + 1))


def test_workers_that_gain_nothing_part_again(mpi: Mpi, folder: Path, expected: Mapping[float, list[float]]) -> None:
    options = ["--ranks-per-worker", 1, "--elastic"]
    job = mpi.run(2, *growing("run", *options, scales=False, seconds=0.5), cwd=folder)
    assert (job.returncode, job.stderr) == (0, "")
    assert_same(curves(folder / "run"), expected)
    there, back = teams_of(folder / "run")[0]
    assert back["workers"] == there["workers"][:1]
    assert back["after"] == there["after"] + 2, "two losses tell"


def test_grow_without_saving_is_one_warning(mpi: Mpi, folder: Path) -> None:
    options = ["--ranks-per-worker", 1, "--elastic"]
    job = mpi.run(2, *growing("run", *options, evaluations=6, saves=False, seconds=0.1), cwd=folder)
    said = (
        r"warning: --elastic does nothing: trial \d+ has not called worker\.save\. Call it before each yield, and .*\n"
    )
    assert job.returncode == 0
    assert re.fullmatch(said, job.stderr), job.stderr
    assert teams_of(folder / "run") == [[]] * 6


def test_an_objective_that_begins_again_is_told_so_once(
    mpi: Mpi, folder: Path, expected: Mapping[float, list[float]]
) -> None:
    options = ["--ranks-per-worker", 1, "--elastic"]
    job = mpi.run(2, *growing("run", *options, restores=False, seconds=0.6), cwd=folder)
    assert job.returncode == 0, job.stderr
    (line,) = job.stderr.splitlines()
    assert re.fullmatch(r"warning: --elastic: trial 0 has begun again with 2 workers: .* worker\.checkpoint", line), (
        line
    )
    assert_same(curves(folder / "run"), expected)


def test_what_confirms_the_best_grows(mpi: Mpi, folder: Path) -> None:
    options = ["--ranks-per-worker", 1, "--elastic", "--confirm-seeds", 1, "--top-n", 1]
    job = mpi.run(2, *growing("run", *options, evaluations=1, epochs=10), cwd=folder)
    assert (job.returncode, job.stderr) == (0, "")
    (confirmed,) = load_trials(folder / "run", "run-confirm")
    assert confirmed.state.name == "COMPLETE"
    assert confirmed.params["x"] == LONG
    assert len(confirmed.user_attrs["worker_groups"]) == 1


def test_what_is_promoted_has_more_workers_before_the_end(mpi: Mpi, folder: Path) -> None:
    best, others = {"x": 0.5, "lr": 0.1}, [{"x": 1 - number / 100, "lr": 0.01} for number in range(9)]
    (folder / "start.json").write_text(json.dumps([best, *others]))  # the best is first at each rung
    options = ["--ranks-per-worker", 1, "--elastic", "--pruner", "asha"]
    job = mpi.run(3, *growing("run", *options, evaluations=10, epochs=18, seconds=1), cwd=folder)
    assert (job.returncode, job.stderr) == (0, "")
    trials = load_trials(folder / "run")
    last = max(t.datetime_start.timestamp() for t in trials if t.datetime_start)
    grown = [team for teams in teams_of(folder / "run") for team in teams if team["at"] < last]
    assert any(len(team["workers"]) == 2 for team in grown), "others had begun nothing new yet"
    whole = mpi.run(2, *growing("whole", evaluations=10, epochs=18, seconds=0), cwd=folder)
    assert (whole.returncode, whole.stderr) == (0, "")
    there = curves(folder / "whole")
    for x, losses in curves(folder / "run").items():
        assert losses == pytest.approx(there[x][: len(losses)], rel=0, abs=1e-5)


def test_nothing_can_grow_that_is_not_saved(tmp_path: Path) -> None:
    message = "^--elastic and --checkpoint-every off exclude each other: more workers can join .* only at a checkpoint$"
    with pytest.raises(UsageError, match=message):
        start_session(tmp_path / "run", elastic=True, checkpoint_every=math.inf)
    assert not (tmp_path / "run").exists()


def test_how_long_an_evaluation_still_goes_on() -> None:
    whole = make_evaluation(0, curve=dict.fromkeys(range(1, 11), 1.0))
    assert estimate_losses_left([whole], 4) == 6
    assert estimate_losses_left([whole], 10) == 0
    assert estimate_losses_left([whole], 12) == 12, "it is the longest by now"
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
def test_who_is_promising(losses: int, workers: int, is_promising: bool) -> None:
    teams = [{"workers": list(range(workers)), "after": 2, "at": 1.0}] if workers > 1 else []
    whole = make_evaluation(0, curve=dict.fromkeys(range(1, 28), 1.0))
    running = make_evaluation(1, "running", curve=dict.fromkeys(range(1, losses + 1), 1.0), worker_groups=teams)
    found = find_expandable(HALVING_SCHEDULES["asha"], [whole, running], now=1.0 + 3.0 * losses)
    assert [(p.trial, p.worker, p.max_wait) for p in found] == ([(1, 0, 3.0)] if is_promising else [])


def test_an_evaluation_that_was_promoted_and_has_no_loss_yet_is_not_waited_for() -> None:
    paused = make_evaluation(0, "promoted", curve={1: 1.0, 2: 1.0, 3: 1.0}, paused_after=3)
    again = make_evaluation(1, "running", curve=paused.curve, retry_of=0, resumed_from_step=3)
    assert find_expandable(HALVING_SCHEDULES["asha"], [paused, again], now=9.0) == []


def test_the_time_of_those_who_help() -> None:
    teams = [
        {"workers": [2, 1], "after": 3, "at": 10.0},
        {"workers": [2, 1, 0, 3], "after": 5, "at": 14.0},
        {"workers": [2], "after": 7, "at": 15.0},
    ]
    evaluation = make_evaluation(0, worker=2, worker_groups=teams)
    spans = [(part.worker, part.start, part.stop, part.from_step) for part in find_help_periods(evaluation, 20.0)]
    assert spans == [(1, 10, 14, 3), (1, 14, 15, 5), (0, 14, 15, 5), (3, 14, 15, 5)]
    assert evaluation.workers == [2]
    interrupted = find_help_periods(evaluation, 12.0)
    assert [(part.worker, part.start, part.stop) for part in interrupted] == [(1, 10, 12)], "nothing is known of more"
    figure = draw_timeline([make_evaluation(0, worker=0, worker_groups=teams[:2])], 1, None)
    assert figure is not None
    assert figure.layout["yaxis"]["range"][0] > 3, "in an earlier session there were more workers"
    assert find_help_periods(make_evaluation(0), math.inf) == []
