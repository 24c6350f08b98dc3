"""Commands that a run advises: each is run, and does what the sentence before it says."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpo.results.advice.run_result import Advice, RunResult
from hpo.results.reader import RunReader
from hpo.run.session import Session
from hpo.store.evaluations import Evaluation, rank_evaluations
from hpo.trainer.search_file import load_search_file
from tests.support.launch import PROGRAM, Hpo, Mpi
from tests.support.run_output import load_trials
from tests.support.runs import QUICK, claim_evaluation, complete_evaluations, start_session
from tests.test_advice import broken, busy, crowded, falling, far, flat, result, told, with_curves

RUN = Path("run")
OPTIONS: dict[str, Any] = {"evaluations": 8, "top_n": 4, "seed": 3, "target_loss": 2.0, "evaluation_timeout": 50.0}


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    """Leave a run of 5 of 8 evaluations whose target is reached: trial 0 has a loss of 2, trial 1 of 3, and so on."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(PROGRAM), str(QUICK), "--run-dir", "run"])
    left = start_session(RUN, propagators=("random",), settings=("epochs=3",), **OPTIONS)
    complete_evaluations(left.open_record(), 2, 3, 4, 5, 6)
    return left


def advise(kind: str, known: RunResult) -> Advice:
    advice = told(known, kind)
    assert advice is not None
    assert advice.command
    return advice


def type_in(mpi: Mpi, command: str, ranks: int = 2) -> str:
    """Run a command that a run has printed, and return its output."""
    job = mpi.run(ranks, *shlex.split(command), cwd=Path.cwd())
    assert (job.returncode, job.stderr) == (0, ""), job.stdout
    return job.stdout


def confirmed() -> dict[int, int]:
    """Return the numbers of seeds of the trials in the table of the confirmed."""
    summary = json.loads((RUN / "summary.json").read_text())
    return {entry["trial"]: len(entry["losses"]) for entry in summary["confirmed"]}


def with_losses(confirmations: Sequence[Evaluation], losses: Mapping[int, list[float]]) -> list[Evaluation]:
    """Return confirmations with other losses, by the trials that they confirm."""
    left = {trial: list(some) for trial, some in losses.items()}
    return [replace(one, loss=left[one.confirms].pop()) for one in confirmations if one.confirms is not None]


@pytest.mark.usefixtures("session")
def test_confirm_trains_the_advised_trials_alone(mpi: Mpi) -> None:
    known = RunReader(RUN).make_result()
    close = [replace(one, loss=1.99) if one.trial == 1 else one for one in known.evaluations]
    first = advise("confirm", replace(known, evaluations=close))
    assert first.text.startswith("Train the best again with other seeds")
    type_in(mpi, first.command)
    assert confirmed() == dict.fromkeys(range(4), 3), "--top-n 4"
    known = RunReader(RUN).make_result()
    alike = {0: [0.10, 0.14, 0.12], 1: [0.11, 0.15, 0.13], 2: [0.5, 0.51, 0.52], 3: [0.6, 0.61, 0.62]}
    more = advise("confirm", replace(known, confirmations=with_losses(known.confirmations, alike)))
    seeds = int(shlex.split(more.command)[-1])
    assert f"with {seeds} seeds" in more.text
    output = type_in(mpi, more.command)
    assert f"confirming the best with {seeds} other seeds each: {4 * (seeds - 3)} evaluations" in output
    assert confirmed() == dict.fromkeys(range(4), seeds)
    assert len(load_trials(RUN)) == 5, "the target is kept, so that nothing else is trained"


@pytest.mark.usefixtures("session")
def test_run_continues_after_its_target_by_the_remedy(mpi: Mpi) -> None:
    command = shlex.join([str(PROGRAM), str(QUICK), "--run-dir", "run", "--resume"])
    output = type_in(mpi, f"{command} --target-loss off")
    assert "--target-loss was 2 before, and is off now" in output
    assert "Stopped" not in output
    assert [trial.state.name for trial in load_trials(RUN)] == ["COMPLETE"] * 8


WAITS = [*flat(40)[:4], replace(flat(40)[4], ended=200.0)]
NEW_RUNS: dict[str, tuple[str, RunResult, dict[str, Any]]] = {
    "epochs": ("epochs", result(with_curves(falling)), {}),
    "bounds": ("bounds", result(crowded(64, far, lr=1.0)), {}),
    "fewer": ("idle", result(WAITS, last_summary=busy(0.29)), {"ranks_per_worker": 4}),
    "grow": (
        "idle",
        result([*WAITS[:4], replace(WAITS[4], checkpoint_step=3)], last_summary=busy(0.29)),
        {"elastic": True},
    ),
}


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("name", NEW_RUNS)
def test_new_run_has_the_options_of_the_old_one(mpi: Mpi, name: str) -> None:
    kind, made_up, changes = NEW_RUNS[name]
    before = RunReader(RUN).make_result()
    target = min(one.loss for one in made_up.evaluations) - 1  # It is not reached, so the new run has it, too.
    entry = before.manifest.sessions[-1]
    entry = replace(entry, options={**entry.options, "target_loss": target})
    advice = advise(kind, replace(made_up, run_dir=RUN, manifest=replace(before.manifest, sessions=(entry,))))
    job = mpi.run(4, *shlex.split(advice.command), cwd=Path.cwd())
    assert job.returncode == 0, job.stderr
    (run_json,) = Path("runs").glob("*/run.json")
    after = RunReader(run_json.parent)
    assert after.manifest.sessions[-1].options == {**entry.options, **changes}
    assert after.manifest.settings == {"seconds": 0.0, "epochs": 6 if name == "epochs" else 3}
    assert after.manifest.layout.workers == (1 if name == "fewer" else 2)
    assert after.make_summary(3)["evaluations"]["complete"] == OPTIONS["evaluations"]
    assert after.make_summary(3)["taken_over"] == (5 if name == "bounds" else 0)


def test_worker_advice_shows_a_failed_evaluation(session: Session, hpo: Hpo) -> None:
    record, space = session.open_record(), load_search_file(QUICK).space
    for number in range(20):
        params = {"depth": 7, "act": "tanh", "flag": True, "lr": 0.01 + number / 100}
        assignment = claim_evaluation(record, params, space.make_distributions(), 99, worker=number % 4)
        record.fail(assignment, "no", "Traceback", 0.1)
    made_up = replace(result(broken(2)), run_dir=RUN, manifest=session.manifest)
    words = shlex.split(advise("worker", made_up).command)
    status, out, err = hpo(*words[1:])
    assert (words[0], status, err) == ("hpo", 0, "")
    assert out.startswith("trial 22 of run: failed")


def test_grow_is_not_advised_where_it_cannot_help() -> None:
    made_up = NEW_RUNS["grow"][1]
    program = replace(made_up.manifest, command="hpo search --loss x -- train.py")
    entry = made_up.manifest.sessions[-1]
    given = replace(made_up.manifest, sessions=(replace(entry, options={"elastic": True}),))
    for about in (program, given):
        advice = told(replace(made_up, manifest=about), "idle")
        assert advice is not None
        assert "--ranks-per-worker 4" in advice.command
    many = replace(made_up.manifest, propagators=("ga", "tpe", "random"), command="hpo search --loss x -- train.py")
    advice = told(replace(made_up, manifest=many), "idle")
    assert advice is not None
    assert advice.command == "", "each propagator needs a worker"


@pytest.mark.usefixtures("session")
def test_target_that_is_reached_is_left_out_of_a_new_run() -> None:
    known = RunReader(RUN).make_result()
    assert known.is_spent
    command = known.format_new_command()
    assert "--target-loss" not in command
    assert shlex.split(command)[2:] == [
        *("--set", "epochs=3", "--evaluations", "8", "--propagators", "random", "--seed", "3", "--top-n", "4"),
        *("--evaluation-timeout", "50"),
    ]


@pytest.mark.usefixtures("session")
def test_resuming_command_has_options_that_are_not_kept() -> None:
    known = RunReader(RUN).make_result()
    entry = known.manifest.sessions[-1]
    entry = replace(entry, options={**entry.options, "ranks_per_worker": 4})
    about = replace(known.manifest, sessions=(entry,), storage="postgresql://me:***@host/db")
    words = shlex.split(replace(known, manifest=about).format_confirm_command(3))[2:]
    assert words == [
        *("--run-dir", "run", "--resume", "--ranks-per-worker", "4"),
        *("--storage", "postgresql://me:***@host/db", "--confirm-seeds", "3"),
    ]


def confirm_all(session: Session, n: int) -> None:
    """Record confirmations of the best, with the losses of the search."""
    space = load_search_file(QUICK).space
    session.create_confirmations(space)
    evaluations, confirmations = session.open_record().read_evaluations(), session.open_confirmations()
    best = session.find_to_confirm(evaluations, confirmations.read_evaluations(), n)
    total = session.confirmation_plan.enqueue_planned(confirmations, best, space)
    for _ in range(session.confirmation_plan.count_remaining(best, confirmations.read_evaluations())):
        assignment = claim_evaluation(confirmations, None, {}, total)
        confirmations.complete(assignment, 1.0, 1.0, {})


@pytest.mark.usefixtures("session")
def test_confirmed_trials_stay_in_the_table_of_a_new_best() -> None:
    confirm_all(start_session(RUN, resume=True, confirm_seeds=2, top_n=2), 2)
    complete_evaluations(start_session(RUN, resume=True, confirm_seeds=2, top_n=2).open_record(), 1)
    more = start_session(RUN, resume=True, confirm_seeds=4, top_n=2)
    evaluations, confirmations = more.open_record().read_evaluations(), more.open_confirmations().read_evaluations()
    assert [one.trial for one in rank_evaluations(evaluations, 2)] == [5, 0]
    assert [one.trial for one in more.find_to_confirm(evaluations, confirmations, 2)] == [5, 0, 1]
    assert {one.confirms for one in RunReader(RUN).read_confirmations()} == {0, 1}
    confirm_all(more, 2)
    assert sorted(one.confirms or 0 for one in RunReader(RUN).read_confirmations()) == [*[0] * 4, *[1] * 4, *[5] * 4]
    fewer = start_session(RUN, resume=True, confirm_seeds=6, top_n=1)
    found = fewer.find_to_confirm(evaluations, fewer.open_confirmations().read_evaluations(), 1)
    assert [one.trial for one in found] == [5], "--top-n was given again"
    confirm_all(fewer, 1)
    assert sorted(one.confirms or 0 for one in RunReader(RUN).read_confirmations()) == [*[0] * 4, *[1] * 4, *[5] * 6]
    again = start_session(RUN, resume=True, confirm_seeds=6, top_n=1)
    found = again.find_to_confirm(evaluations, again.open_confirmations().read_evaluations(), 1)
    assert [one.trial for one in found] == [5], "the same command has nothing left to do"
    winner = RunReader(RUN).find_winner()
    assert winner is not None
    assert winner.trial == 5, "all losses are the same; the others have fewer seeds"


@pytest.mark.usefixtures("session")
def test_confirm_is_not_advised_before_the_search_is_over() -> None:
    confirm_all(start_session(RUN, resume=True, confirm_seeds=3, top_n=2, target_loss=2.0), 2)
    known = RunReader(RUN).make_result()
    alike = with_losses(known.confirmations, {0: [0.10, 0.14, 0.12], 1: [0.11, 0.15, 0.13]})
    assert told(replace(known, confirmations=alike), "confirm") is not None
    start_session(RUN, resume=True, top_n=2, target_loss=1.0)
    known = RunReader(RUN).make_result()
    assert not known.is_spent
    assert told(replace(known, confirmations=alike), "confirm") is None
