"""Run each advised command, and check that it does what the advice promises."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpo.results.advice import Advice
from hpo.results.reader import RunReader
from hpo.results.run_snapshot import RunSnapshot
from hpo.run.session import Session
from hpo.store.evaluations import Evaluation, rank_evaluations
from hpo.trainer.search_file import load_search_file
from hpo.views.evaluation_details import EvaluationLookup
from tests.support.advice import (
    compute_distant_loss,
    compute_falling_loss,
    find_by_kind,
    make_crowded_search,
    make_curves,
    make_flat_search,
    make_result,
    make_session_times,
)
from tests.support.launch import PROGRAM, SEARCHES, Mpi
from tests.support.limits import scale
from tests.support.run_output import load_trials
from tests.support.runs import QUICK, claim_evaluation, complete_evaluations, start_session

NOISY = SEARCHES / "noisy.py"
RUN = Path("run")
OPTIONS: dict[str, Any] = {
    "evaluations": 8,
    "top_n": 4,
    "seed": 3,
    "target_loss": 2.0,
    "evaluation_timeout": 50.0,
}


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    """Return a session that has reached its target after 5 of 8 evaluations.

    Trial i has the loss i + 2.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(PROGRAM), str(QUICK), "--run-dir", "run"])
    left = start_session(RUN, propagators=("random",), settings=("epochs=3",), **OPTIONS)
    complete_evaluations(left.open_record(), 2, 3, 4, 5, 6)
    return left


def advise(kind: str, known: RunSnapshot) -> Advice:
    advice = find_by_kind(known, kind)
    assert advice is not None
    assert advice.command
    return advice


def split_arguments(command: str) -> list[str]:
    """Return the program of a printed command, and its arguments."""
    words = shlex.split(command)
    return words[words.index(str(PROGRAM)) :]


def run_command(mpi: Mpi, command: str, ranks: int = 2) -> str:
    """Run a printed command with mpirun, and return its output."""
    job = mpi.run(ranks, *split_arguments(command), cwd=Path.cwd())
    assert (job.returncode, job.stderr) == (0, ""), job.stdout
    return job.stdout


def count_confirmed_seeds() -> dict[int, int]:
    """Return the number of seeds with which each trial was confirmed."""
    summary = json.loads((RUN / "summary.json").read_text())
    return {entry["trial"]: len(entry["losses"]) for entry in summary["confirmed"]}


def replace_losses(
    confirmations: Sequence[Evaluation], losses: Mapping[int, list[float]]
) -> list[Evaluation]:
    """Return the confirmations with other losses.

    `losses` has the losses of each trial that was confirmed.
    """
    left = {trial: list(some) for trial, some in losses.items()}
    return [
        replace(evaluation, loss=left[evaluation.confirms].pop())
        for evaluation in confirmations
        if evaluation.confirms is not None
    ]


@pytest.mark.usefixtures("session")
def test_confirm_trains_the_advised_trials_alone(mpi: Mpi) -> None:
    known = RunReader(RUN).take_snapshot(for_advice=True)
    close = [
        replace(evaluation, loss=1.99) if evaluation.trial == 1 else evaluation
        for evaluation in known.evaluations
    ]
    first = advise("confirm", replace(known, evaluations=close))
    assert first.text.startswith("Train the best again with other seeds")
    run_command(mpi, first.command)
    assert count_confirmed_seeds() == dict.fromkeys(range(4), 3), "--top-n 4"
    known = RunReader(RUN).take_snapshot(for_advice=True)
    alike = {
        0: [0.10, 0.14, 0.12],
        1: [0.11, 0.15, 0.13],
        2: [0.5, 0.51, 0.52],
        3: [0.6, 0.61, 0.62],
    }
    more = advise(
        "confirm", replace(known, confirmations=replace_losses(known.confirmations, alike))
    )
    seeds = int(shlex.split(more.command)[-1])
    assert f"with {seeds} seeds" in more.text
    output = run_command(mpi, more.command)
    assert (
        f"confirming the best with {seeds} other seeds each: {4 * (seeds - 3)} evaluations"
        in output
    )
    assert count_confirmed_seeds() == dict.fromkeys(range(4), seeds)
    assert len(load_trials(RUN)) == 5, "the resumed run keeps the target, so it trains nothing else"


@pytest.mark.usefixtures("session")
def test_resume_with_the_remedy_continues_after_the_target(mpi: Mpi) -> None:
    command = shlex.join([str(PROGRAM), str(QUICK), "--run-dir", "run", "--resume"])
    output = run_command(mpi, f"{command} --target-loss off")
    assert "--target-loss was 2 before, and is off now" in output
    assert "Stopped" not in output
    assert [trial.state.name for trial in load_trials(RUN)] == ["COMPLETE"] * 8


WAITS = [*make_flat_search(40)[:4], replace(make_flat_search(40)[4], ended=200.0)]
NEW_RUNS: dict[str, tuple[str, RunSnapshot, dict[str, Any]]] = {
    "epochs": ("epochs", make_result(make_curves(compute_falling_loss)), {}),
    "bounds": ("bounds", make_result(make_crowded_search(64, compute_distant_loss, lr=1.0)), {}),
    "fewer": (
        "idle",
        make_result(WAITS, last_summary=make_session_times(0.29)),
        {"ranks_per_worker": 4},
    ),
}


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("name", NEW_RUNS)
def test_new_run_command_keeps_options_of_the_run(mpi: Mpi, name: str) -> None:
    kind, fake_result, changes = NEW_RUNS[name]
    before = RunReader(RUN).take_snapshot(for_advice=True)
    target = (
        min(evaluation.loss for evaluation in fake_result.evaluations) - 1
    )  # The target is not reached, so the new run keeps it.
    entry = before.manifest.sessions[-1]
    entry = replace(entry, options={**entry.options, "target_loss": target})
    advice = advise(
        kind,
        replace(
            fake_result,
            run_dir=RUN,
            manifest=replace(before.manifest, sessions=(entry,), started=""),
        ),
    )
    job = mpi.run(4, *split_arguments(advice.command), cwd=Path.cwd())
    assert job.returncode == 0, job.stderr
    (run_json,) = Path("runs").glob("*/run.json")
    after = RunReader(run_json.parent)
    assert after.manifest.sessions[-1].options == {**entry.options, **changes}
    assert after.manifest.settings == {"seconds": 0.0, "epochs": 6 if name == "epochs" else 3}
    assert after.manifest.layout.workers == (1 if name == "fewer" else 2)
    assert after.make_summary(3).counts["complete"] == OPTIONS["evaluations"]
    assert after.make_summary(3).imported == (5 if name == "bounds" else 0)


def test_advice_for_a_program_keeps_a_worker_for_each_propagator() -> None:
    fake_result = NEW_RUNS["fewer"][1]
    program = replace(fake_result.manifest, command="hpo search --loss x -- train.py")
    advice = find_by_kind(replace(fake_result, manifest=program), "idle")
    assert advice is not None
    assert "--ranks-per-worker 4" in advice.command
    many = replace(program, propagators=("ga", "tpe", "random"))
    advice = find_by_kind(replace(fake_result, manifest=many), "idle")
    assert advice is not None
    assert advice.command == "", "each propagator needs a worker"


def run_pasted(command: str) -> str:
    """Run a command in a shell, and return its output."""
    job = subprocess.run(
        command, shell=True, capture_output=True, text=True, check=True, timeout=scale(100)
    )
    return job.stdout


def test_resume_command_can_be_pasted(
    each_mpi: Mpi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--run-dir", "run", "--set", "epochs=1"]
    job = each_mpi.launch(2, PROGRAM, QUICK, *options, "--evaluations", 2, cwd=tmp_path)
    assert job.returncode == 0, job.stderr
    reader = RunReader(RUN)
    flags = shlex.join([*each_mpi.flags, "-n", "2"])
    assert reader.manifest.launcher.partition(" ")[2].startswith(flags)
    output = run_pasted(reader.take_snapshot().format_resume_command("--evaluations", "3"))
    assert "3 complete, of 3" in output
    assert RunReader(RUN).manifest.launcher == reader.manifest.launcher


def test_shown_command_repeats_an_evaluation(
    mpi: Mpi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = NOISY.read_text()
    Path("noisy.py").write_text(source)
    options = [PROGRAM, "noisy.py", "--run-dir", "run", "--seed", 7]
    for budget, noise in ((4, 100), (6, 1)):
        more = ["--evaluations", budget, "--set", f"noise={noise}", "--resume"]
        assert mpi.run(4, *options, *more, cwd=tmp_path).returncode == 0
    Path("noisy.py").write_text(source.replace("return params", "return 0 * params"))
    lookup = EvaluationLookup.read(RunReader(RUN))
    for trial, noise in ((2, 100), (5, 1)):
        details = lookup.collect_details(lookup.find_evaluation(str(trial)))
        words = split_arguments(details.repeat_command)
        assert words[1] == "run/search_space-1.py", "noisy.py has changed"
        assert f"noise={noise}" in words
        run_command(mpi, details.repeat_command)
        (again,) = load_trials(tmp_path / f"run-trial-{trial}")
        before = load_trials(RUN)[trial]
        assert (again.values, again.params) == (before.values, before.params)


@pytest.mark.parametrize(
    "command", ["mpirun -n 2 sh -c 'exec {program}'", "mpirun -genv PASSWORD secret -n 2 {program}"]
)
def test_launchers_without_readable_options_have_the_ranks(
    mpi: Mpi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    mpirun, _, _, *words, _ = mpi.make_command(2, PROGRAM)
    program = shlex.join([*words, str(PROGRAM), str(QUICK), "--run-dir", "run"])
    run_pasted(command.format(program=f"{program} --evaluations 2"))
    assert RunReader(RUN).manifest.launcher == shlex.join([mpirun, "-n", "2", *words])


@pytest.mark.usefixtures("session")
def test_new_run_command_omits_a_reached_target() -> None:
    known = RunReader(RUN).take_snapshot(for_advice=True)
    assert known.is_spent
    command = known.format_new_command()
    assert "--target-loss" not in command
    assert split_arguments(command)[2:] == [
        *("--set", "epochs=3", "--evaluations", "8", "--evaluation-timeout", "50"),
        *("--propagators", "random", "--seed", "3", "--top-n", "4"),
    ]


@pytest.mark.usefixtures("session")
def test_resume_command_has_options_that_are_not_kept() -> None:
    known = RunReader(RUN).take_snapshot(for_advice=True)
    entry = known.manifest.sessions[-1]
    entry = replace(entry, options={**entry.options, "ranks_per_worker": 4})
    about = replace(known.manifest, sessions=(entry,), storage="postgresql://me:***@host/db")
    words = split_arguments(replace(known, manifest=about).format_confirm_command(3))[2:]
    assert words == [
        *("--run-dir", "run", "--resume", "--ranks-per-worker", "4"),
        *("--storage", "postgresql://me:***@host/db", "--confirm-seeds", "3"),
    ]


def confirm_all(session: Session) -> None:
    """Record all planned confirmations of the best trials. Each has the loss 1."""
    space = load_search_file(QUICK).space
    session.create_confirmations(space)
    evaluations, confirmations = (
        session.open_record().read_evaluations(),
        session.open_confirmations(),
    )
    best = session.find_to_confirm(evaluations, confirmations.read_evaluations())
    total = session.confirmation_plan.enqueue_planned(confirmations, best, space)
    for _ in range(
        session.confirmation_plan.count_remaining(best, confirmations.read_evaluations())
    ):
        assignment = claim_evaluation(confirmations, None, {}, total)
        confirmations.complete(assignment, 1.0, 1.0, {})


@pytest.mark.usefixtures("session")
def test_confirmed_trials_stay_in_the_table_of_a_new_best() -> None:
    confirm_all(start_session(RUN, resume=True, confirm_seeds=2, top_n=2))
    complete_evaluations(start_session(RUN, resume=True, confirm_seeds=2, top_n=2).open_record(), 1)
    more = start_session(RUN, resume=True, confirm_seeds=4, top_n=2)
    evaluations, confirmations = (
        more.open_record().read_evaluations(),
        more.open_confirmations().read_evaluations(),
    )
    assert [evaluation.trial for evaluation in rank_evaluations(evaluations, 2)] == [5, 0]
    assert [
        evaluation.trial for evaluation in more.find_to_confirm(evaluations, confirmations)
    ] == [5, 0, 1]
    assert {evaluation.confirms for evaluation in RunReader(RUN).read_confirmations()} == {0, 1}
    confirm_all(more)
    assert sorted(
        evaluation.confirms or 0 for evaluation in RunReader(RUN).read_confirmations()
    ) == [
        *[0] * 4,
        *[1] * 4,
        *[5] * 4,
    ]
    fewer = start_session(RUN, resume=True, confirm_seeds=6, top_n=1)
    found = fewer.find_to_confirm(evaluations, fewer.open_confirmations().read_evaluations())
    assert [evaluation.trial for evaluation in found] == [5], "--top-n was given again"
    confirm_all(fewer)
    assert sorted(
        evaluation.confirms or 0 for evaluation in RunReader(RUN).read_confirmations()
    ) == [
        *[0] * 4,
        *[1] * 4,
        *[5] * 6,
    ]
    again = start_session(RUN, resume=True, confirm_seeds=6, top_n=1)
    found = again.find_to_confirm(evaluations, again.open_confirmations().read_evaluations())
    assert [evaluation.trial for evaluation in found] == [5], (
        "a repeated command must find nothing left to do"
    )
    winner = RunReader(RUN).find_winner()
    assert winner is not None
    assert winner.trial == 5, "all losses are equal, and the others have fewer seeds"


@pytest.mark.usefixtures("session")
def test_confirm_is_not_advised_before_the_search_is_over() -> None:
    confirm_all(start_session(RUN, resume=True, confirm_seeds=3, top_n=2, target_loss=2.0))
    known = RunReader(RUN).take_snapshot(for_advice=True)
    alike = replace_losses(known.confirmations, {0: [0.10, 0.14, 0.12], 1: [0.11, 0.15, 0.13]})
    assert find_by_kind(replace(known, confirmations=alike), "confirm") is not None
    start_session(RUN, resume=True, top_n=2, target_loss=1.0)
    known = RunReader(RUN).take_snapshot(for_advice=True)
    assert not known.is_spent
    assert find_by_kind(replace(known, confirmations=alike), "confirm") is None
