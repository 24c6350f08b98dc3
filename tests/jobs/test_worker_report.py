"""Test objectives that report with `worker.report`, and offer functions for weights."""

from __future__ import annotations

import json
import math
import re
import signal
import time
from pathlib import Path

import pytest

from hpo.store.weights import read_weights
from tests.support.chaos import Victim
from tests.support.launch import PROGRAM, SEARCHES, Mpi
from tests.support.limits import scale
from tests.support.run_output import find_complete_losses, load_trials

REPORTING = SEARCHES / "reporting.py"


def make_arguments(ways: str, *options: object, **settings: object) -> list[object]:
    chosen = [option for name, value in settings.items() for option in ("--set", f"{name}={value}")]
    layout = ["--islands", 1, "--run-dir", "run"]
    return [PROGRAM, REPORTING, *layout, "--set", f"ways={ways}", *options, *chosen]


def find_line(code: str) -> str:
    """Return a pattern for the file name and line number of this code in reporting.py.

    It must occur once.
    """
    (number,) = [n for n, line in enumerate(REPORTING.read_text().splitlines(), 1) if code in line]
    return rf"reporting\.py:{number}"


def read_events(folder: Path, rank: int) -> list[tuple[str, float, int]]:
    return [tuple(json.loads(line)) for line in (folder / f"0-{rank}").read_text().splitlines()]


@pytest.mark.parametrize("size", [1, 3])
def test_reports_are_recorded_and_best_weights_gathered(
    mpi: Mpi, tmp_path: Path, size: int
) -> None:
    ways = ["gathers", "yields_gathers", "yields", "reports", "mixed", "returns"]
    values = [0.6, 0.5, 0.9, 0.7, 0.8, 0.95, 0.65, 0.2]
    (tmp_path / "start.json").write_text(json.dumps([{"x": x} for x in values]))
    options = ["--ranks-per-worker", size, "--evaluations", len(values), "--enqueue", "start.json"]
    job = mpi.run(size, *make_arguments(",".join(ways), *options), cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    trials = load_trials(tmp_path / "run")
    assert [trial.params["x"] for trial in trials] == values
    best, expected = math.inf, []
    for trial, way in zip(trials, ways + ways, strict=False):
        x = trial.params["x"]
        assert trial.state.name == "COMPLETE"
        assert trial.intermediate_values == pytest.approx({1: x + 3, 2: x + 1, 3: x + 2})
        assert trial.values == pytest.approx([x + 1])
        assert trial.user_attrs.get("metrics") == ({"epoch": 2.0} if way != "gathers" else None)
        own = math.inf
        for epoch, loss in trial.intermediate_values.items():
            if loss < min(own, best) and way in ("gathers", "yields_gathers"):
                expected.append((x, epoch))
            own = min(own, loss)
        best = min(best, own)
    assert expected == [(0.6, 1), (0.6, 2), (0.5, 2), (0.2, 2)], (
        "weights are gathered only for new best losses of objectives that offer them"
    )
    for rank in range(size):
        assert [
            (x, epoch) for event, x, epoch in read_events(tmp_path, rank) if event == "gathers"
        ] == expected
    weights = read_weights(tmp_path / "run" / "best.safetensors")
    assert weights is not None
    losses = find_complete_losses(trials)
    assert (weights.trial, weights.state["epoch"].item()) == (
        min(losses, key=losses.__getitem__),
        2.0,
    )


# By the objective's variant: the pattern of its failure, and the number of losses before it; `RANK`
# stands for the last rank. None marks a successful evaluation. "late" reports to the worker of an
# earlier evaluation in the same process. Weights are gathered only for the best loss, so the
# variants that gather come first.
REASONS: dict[str, tuple[str, int] | None] = {
    "gather_raises": (r"RANK, reporting.py:\d+: ValueError: injected in a function", 1),
    "gather_nothing": (
        r"rank 0, reporting.py:\d+: TypeError: offered weights must be a .*, got a NoneType",
        1,
    ),
    "gather_reports": (
        r"rank \d, .*RuntimeError: worker.report must not be called in a function given to .*",
        1,
    ),
    "fewer": (
        r"the ranks do not yield equally many losses: rank 0 \S+ at reporting.py:\d+, .*RANK ended",
        2,
    ),
    "raises": (r"RANK, reporting.py:\d+: ValueError: injected", 1),
    "text": (
        r"rank \d, reporting.py:\d+: TypeError: the loss must be a number, got 'low'",
        0,
    ),
    "metric": (
        r"rank \d, reporting.py:\d+: TypeError: metric 'note' must be a number, got 'good'",
        0,
    ),
    "nan": (r"RANK, reporting.py:\d+: ValueError: the validation loss is nan", 1),
    "positional": (
        r"rank \d, .*positional arguments.* \(metrics go by name: worker.report\(loss, "
        r"accuracy=0.9\)\)",
        0,
    ),
    "differs": (r"the ranks yielded different losses: rank 0 \S+ at reporting.py:\d+, .*", 0),
    "swallows": (r"RANK, reporting.py:\d+: ValueError: the validation loss is nan", 2),
    "thread": (
        r"rank \d, .*RuntimeError: worker.report must be called in the main thread, .* in other",
        0,
    ),
    "reports": None,
    "late": (
        r"rank \d, .*RuntimeError: worker.report must not be called after the evaluation .* has "
        r"ended",
        0,
    ),
    "gather_alone": (
        r"not all ranks offered a function, .*: rank 0 did at \S+, .*RANK did not at .*",
        0,
    ),
    "gathers": None,
}


def test_report_error_fails_only_its_evaluation(mpi: Mpi, tmp_path: Path) -> None:
    size, ways = 2, list(REASONS)
    options = ["--ranks-per-worker", size, "--evaluations", len(ways), "--collective-timeout", 30]
    job = mpi.run(size, *make_arguments(",".join(ways), *options), cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    trials = load_trials(tmp_path / "run")
    for way, trial in zip(ways, trials, strict=True):
        if (expected := REASONS[way]) is None:
            assert trial.state.name == "COMPLETE"
            continue
        pattern = expected[0].replace("RANK", f"rank {size - 1}")
        assert re.fullmatch(pattern, trial.user_attrs["failure"]), (
            f"{way}: {trial.user_attrs['failure']}"
        )
        assert len(trial.intermediate_values) == expected[1], way
        assert "hpo/trainer" not in trial.user_attrs.get("traceback", ""), way
    swallowed = trials[ways.index("swallows")].params["x"]
    for rank in range(size):
        mine = [(event, epoch) for event, x, epoch in read_events(tmp_path, rank) if x == swallowed]
        earlier = [("starts", 0), ("returned", 1), ("returned", 1), ("goes on", 1)]
        assert mine[:4] == earlier
        # On busy cores, a rank is killed before it leaves.
        later = [("goes on", 2), ("goes on", 3), ("leaves", 3)]
        assert mine[4:] == later[: len(mine) - 4], "each report after the error must raise it again"
        assert mine[4:]


def test_report_timeout_names_waiting_and_blocking_lines(mpi: Mpi, tmp_path: Path) -> None:
    waited = r"timeout: rank 0 waited 2 s \(--collective-timeout\) at"
    options = ["--evaluations", 3, "--collective-timeout", 2]
    job = mpi.run(2, *make_arguments("sleeps,gather_sleeps,reports", *options), cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    asleep, gathering, well = load_trials(tmp_path / "run")
    reason = (
        f"{waited} {find_line('# while it sleeps')} for rank 1, which was at "
        f"{find_line('# in the last rank')}"
    )
    assert re.fullmatch(reason, asleep.user_attrs["failure"]), asleep.user_attrs["failure"]
    reason = (
        f"{waited} {find_line('# the ranks are here together')} for rank 1, which was at "
        f"{find_line('# in a function')}"
    )
    assert re.fullmatch(reason, gathering.user_attrs["failure"]), gathering.user_attrs["failure"]
    assert len(gathering.intermediate_values) == 1
    assert well.state.name == "COMPLETE"


@pytest.mark.parametrize("slow", [0, 1])
def test_rank_that_waits_in_each_epoch_does_not_hang(mpi: Mpi, tmp_path: Path, slow: int) -> None:
    """One rank waits for the other in each epoch, in all for longer than one may wait."""
    options = ["--evaluations", 1, "--collective-timeout", 6]
    job = mpi.run(2, *make_arguments("reports", *options, seconds=3.5, slow=slow), cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    (trial,) = load_trials(tmp_path / "run")
    assert trial.state.name == "COMPLETE", trial.user_attrs


def test_offered_function_that_hangs_at_last_loss_times_out(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(
        "import time\n"
        "from hpo import Float, SearchSpace\n"
        "space = SearchSpace(x=Float(0.0, 1.0))\n"
        "def objective(params, worker):\n"
        "    def gather():\n"
        "        time.sleep(3600 if worker.rank else 0)\n"
        "        return {}\n"
        "    worker.offer_weights(gather)\n"
        "    return params['x']\n"
    )
    options = ["--evaluations", 1, "--collective-timeout", 2, "--run-dir", "run"]
    job = mpi.run(2, PROGRAM, "hanging.py", *options, cwd=tmp_path)
    assert job.returncode == 3
    (trial,) = load_trials(tmp_path / "run")
    reason = (
        "timeout: rank 0 waited 2 s (--collective-timeout) at its end; rank 1 was at hanging.py:6"
    )
    assert trial.user_attrs["failure"] == reason


def test_signal_stops_run_while_objective_waits_in_report(mpi: Mpi, tmp_path: Path) -> None:
    arguments = make_arguments("reports", "--evaluations", 40, seconds=30)
    victim = Victim(mpi, 2, arguments, tmp_path, tmp_path / "log")
    victim.wait_for("done  island")
    while len(load_trials(tmp_path / "run")) < 1:
        victim.sleep(0.2)
    victim.sleep(0.5)
    asked = time.monotonic()
    victim.job.send_signal(signal.SIGUSR1)
    assert victim.wait(30) == (75, "")
    assert time.monotonic() - asked < scale(10)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["waiting"] == 1


@pytest.mark.parametrize("ways", ["gathers", "yields_gathers"])
def test_report_reaching_target_loss_ends_objective(mpi: Mpi, tmp_path: Path, ways: str) -> None:
    options = ["--evaluations", 3, "--target-loss", 2.0]
    job = mpi.run(2, *make_arguments(ways, *options), cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    (trial,) = load_trials(tmp_path / "run")
    assert trial.state.name == "COMPLETE"
    assert list(trial.intermediate_values) == [1, 2]
    for rank in range(2):
        events = [(event, epoch) for event, _, epoch in read_events(tmp_path, rank)]
        left = [("leaves", 2)] if ways == "gathers" else []
        assert events == [("starts", 0), ("gathers", 1), ("goes on", 1), ("gathers", 2), *left]
    weights = read_weights(tmp_path / "run" / "best.safetensors")
    assert weights is not None
    assert (weights.trial, weights.state["epoch"].item()) == (0, 2.0)
