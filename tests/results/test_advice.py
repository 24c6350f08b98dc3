"""Test the advice after a run: its text, evidence and command, and when there is none."""

from __future__ import annotations

import json
import math
import random
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

from hpo import Categorical, Float, Int, Ordinal, SearchSpace
from hpo.options import PROGRAM_OPTIONS
from hpo.results.advice import Advice, find_advice
from hpo.results.failures import find_failure_kinds, find_failure_region, group_failures
from hpo.results.reader import RunReader
from hpo.results.run_snapshot import RunSnapshot
from hpo.run.first_rank import finalize_run
from hpo.store.evaluations import Evaluation
from hpo.store.manifest import SessionEntry
from hpo.text_format import format_list, format_percent, format_value
from hpo.views.page.html_report import render_report
from hpo.views.summary_tables import print_advice
from tests.support.advice import (
    SPACE,
    compute_distant_loss,
    compute_falling_loss,
    draw_search,
    find_by_kind,
    make_crowded_search,
    make_curves,
    make_ended,
    make_flat_search,
    make_result,
    make_session_times,
)
from tests.support.fuzz import VALUES
from tests.support.in_process_template import load_problem
from tests.support.launch import call_hpo
from tests.support.runs import QUICK, START_SECONDS, add_evaluation, make_run


def test_bound_advice_names_a_crowded_upper_bound() -> None:
    advice = find_by_kind(
        make_result(make_crowded_search(64, compute_distant_loss, lr=1.0)), "bounds"
    )
    assert advice is not None
    assert advice.text == "Widen the search space, if such values make sense: lr above 1."
    assert advice.evidence.startswith(
        "Of the best 5, 5 have lr at its upper bound; and the nearer to it,"
    )
    assert (
        advice.command
        == "run_islands.py my.py --set epochs=10 --set 'data=my data' --warm-start runs/x"
    )


def test_bound_advice_names_lower_bounds_of_float_and_int() -> None:
    def loss(params: Mapping[str, Any]) -> float:
        return float(params["gamma"] + 0.1 * (params["layers"] + (params["act"] == "b")))

    advice = find_by_kind(make_result(make_crowded_search(64, loss, gamma=0.0, layers=1)), "bounds")
    assert advice is not None
    assert advice.text.endswith(": gamma below 0 and layers below 1.")
    assert "5 have gamma at its lower bound and 5 have layers at its lower bound" in advice.evidence


@pytest.mark.parametrize(
    ("parameter", "bound"),
    [
        (Float(-8e307, 8e307), "8e+307"),
        (Float(5e-324, 1e308, log=True), "1e+308"),
        (Int(0, 2**53), "9.007e+15"),
    ],
)
def test_bound_advice_handles_ranges_of_any_size(parameter: Float | Int, bound: str) -> None:
    low, high = parameter.limits
    space, step = SearchSpace(x=parameter), high / 50 - low / 50
    values = [{"x": parameter.decode(high - step * max(0, trial - 9))} for trial in range(60)]
    evaluations = [
        make_ended(trial, float(trial), params=params) for trial, params in enumerate(values)
    ]
    advice = find_by_kind(
        make_result(evaluations, distributions=space.make_distributions()), "bounds"
    )
    assert advice is not None
    assert advice.text.endswith(f": x above {bound}.")


def test_bound_advice_keeps_log_integers_above_zero() -> None:
    def loss(params: Mapping[str, Any]) -> float:
        return float(params["x"] + params["y"])

    space = SearchSpace(x=Int(1, 9, log=True), y=Int(2, 9, log=True))
    evaluations = draw_search(60, loss, space=space)
    evaluations += [make_ended(trial, 2.9, params={"x": 1, "y": 2}) for trial in range(60, 70)]
    advice = find_by_kind(
        make_result(evaluations, distributions=space.make_distributions()), "bounds"
    )
    assert advice is not None
    assert advice.text.endswith(": y below 2.")


def test_bound_advice_ignores_unimportant_parameters() -> None:
    def loss(params: Mapping[str, Any]) -> float:
        return float((params["gamma"] - 0.5) ** 2 + 0.01)

    late = [
        replace(evaluation, loss=evaluation.loss / 100)
        for evaluation in make_crowded_search(128, loss, lr=1.0)[64:]
    ]
    evaluations = [*draw_search(64, loss), *late]
    best = sorted(evaluations, key=lambda evaluation: evaluation.loss)[:5]
    assert all(evaluation.params["lr"] == 1.0 for evaluation in best), (
        "the best must lie at the bound"
    )
    assert find_by_kind(make_result(evaluations), "bounds") is None


def test_bound_advice_needs_enough_evaluations_and_values() -> None:
    assert (
        find_by_kind(make_result(make_crowded_search(19, compute_distant_loss, lr=1.0)), "bounds")
        is None
    )
    space = SearchSpace(n=Int(1, 3), x=Float(0.0, 1.0))
    few = draw_search(
        64, lambda params: float(params["n"] + params["x"] * (1 - params["x"])), space=space
    )
    best = sorted(few, key=lambda evaluation: evaluation.loss)[:5]
    assert all(evaluation.params["n"] == 1 for evaluation in best)
    assert (
        find_by_kind(make_result(few, distributions=space.make_distributions()), "bounds") is None
    )


def test_bound_advice_on_random_search_is_rare() -> None:
    def loss(params: Mapping[str, Any]) -> float:
        return float((math.log10(params["lr"]) + 1.5) ** 2 + (params["gamma"] - 0.5) ** 2)

    alarms = sum(
        find_by_kind(make_result(draw_search(40, loss, seed)), "bounds") is not None
        for seed in range(300)
    )
    assert alarms <= 3


def fail_where(
    evaluations: Sequence[Evaluation], fails: Callable[[dict[str, Any]], bool]
) -> list[Evaluation]:
    """Return evaluations of which some have failed, as if the memory was exhausted."""
    failure: dict[str, Any] = {
        "state": "failed",
        "loss": math.inf,
        "failure": "rank 1: OutOfMemoryError: 3 GiB",
    }
    return [replace(e, **failure) if fails(e.params) else e for e in evaluations]


def test_failure_advice_names_the_region_of_two_parameters() -> None:
    ended = fail_where(
        draw_search(60, compute_distant_loss), lambda p: p["layers"] >= 4 and p["gamma"] >= 0.4
    )
    advice = find_by_kind(make_result(ended), "failures")
    assert advice is not None
    failed = [e for e in ended if e.state == "failed"]
    lowest = min(e.params["gamma"] for e in failed)
    assert len(failed) > 10
    where = f"gamma >= {format_value(lowest)} and layers >= 4"
    assert (
        advice.text == f"Exclude {where} from the search space, or make such evaluations possible."
    )
    count = len(failed)
    assert advice.evidence == (
        f"{count} of {count} failures have {where}, and {count} of the {count} evaluations there "
        "failed. The latest failure there is rank 1: OutOfMemoryError: 3 GiB."
    )
    assert advice.command == f"hpo show runs/x {failed[-1].trial}"


def test_failure_advice_names_a_category_and_one_parameter() -> None:
    drawn = draw_search(60, compute_distant_loss)
    advice = find_by_kind(make_result(fail_where(drawn, lambda p: p["act"] == "b")), "failures")
    assert advice is not None
    assert advice.text.startswith("Exclude act = b from")
    advice = find_by_kind(make_result(fail_where(drawn, lambda p: p["lr"] <= 0.005)), "failures")
    assert advice is not None
    highest = max(e.params["lr"] for e in drawn if e.params["lr"] <= 0.005)
    assert advice.text.startswith(f"Exclude lr <= {format_value(highest)} from")


def test_failure_advice_names_the_region_of_one_reason() -> None:
    drawn = fail_where(draw_search(60, compute_distant_loss), lambda p: p["layers"] >= 5)
    ended = [
        replace(e, state="failed", loss=math.inf, failure="rank 0: ValueError: the loss is nan")
        if e.state == "complete" and e.params["gamma"] < 0.3
        else e
        for e in drawn
    ]
    memory = [e for e in ended if e.failure and "Memory" in e.failure]
    others = [e for e in ended if e.failure and "nan" in e.failure]
    assert len(memory) > len(others) >= 4
    advice = find_by_kind(make_result(ended), "failures")
    assert advice is not None
    count = len(memory)
    assert advice.evidence == (
        f"{count} of {count} failures for one reason have layers >= 5, and {count} of the "
        f"{count} evaluations there failed for it. "
        "The latest failure there is rank 1: OutOfMemoryError: 3 GiB."
    )
    kinds = find_failure_kinds(ended, SPACE.make_distributions())
    assert [(kind.reason, len(kind.failed)) for kind in kinds] == [
        ("OutOfMemoryError: 3 GiB", len(memory)),
        ("ValueError: the loss is nan", len(others)),
    ]
    lowest = max(e.params["gamma"] for e in others)
    region = kinds[1].region
    assert region is not None
    assert (region.conditions[0], len(region.failed)) == (
        f"gamma <= {format_value(lowest)}",
        len(others),
    )


def test_failures_for_different_reasons_have_no_region_in_common() -> None:
    """Four failures come from other parameters, and lie at high learning rates by chance."""
    drawn = [make_ended(trial, 1.0, params={"lr": 0.01 * (1 + trial)}) for trial in range(16)]
    reasons = ["AssertionError: not divisible"] * 5
    reasons[2] = "ValueError: the validation loss is nan"
    failed = [
        replace(one, state="failed", loss=math.inf, failure=f"rank 0: {reason}")
        for one, reason in zip(drawn[11:], reasons, strict=True)
    ]
    assert find_by_kind(make_result([*drawn[:11], *failed]), "failures") is None
    alike = [replace(one, failure=failed[0].failure) for one in failed]
    assert find_by_kind(make_result([*drawn[:11], *alike]), "failures") is not None


def test_failure_region_is_a_range_of_choices_that_are_numbers() -> None:
    sizes = [16, 32, 64, 128, 256]
    space = SearchSpace(batch=Ordinal(*sizes), act=Categorical("a", "b"))
    drawn = [
        make_ended(trial, 1.0, params={"batch": sizes[trial % 5], "act": "ab"[trial % 2]})
        for trial in range(60)
    ]
    ended = fail_where(drawn, lambda p: p["batch"] >= 128)
    failed = [evaluation for evaluation in ended if evaluation.state == "failed"]
    region = find_failure_region(ended, space.make_distributions(), failed)
    assert region is not None
    assert (region.conditions, len(region.failed), region.ended) == (["batch >= 128"], 24, 24)


def test_failure_region_of_one_number_is_one_condition() -> None:
    space = SearchSpace(depth=Int(1, 3), act=Categorical("a", "b"))
    drawn = [
        make_ended(trial, 1.0, params={"depth": trial % 3 + 1, "act": "ab"[trial % 2]})
        for trial in range(60)
    ]
    ended = fail_where(drawn, lambda p: p["depth"] == 2)
    failed = [evaluation for evaluation in ended if evaluation.state == "failed"]
    region = find_failure_region(ended, space.make_distributions(), failed)
    assert region is not None
    assert (region.conditions, len(region.failed), region.ended) == (["depth = 2"], 20, 20)


def test_failure_region_counts_promoted_evaluations_once() -> None:
    """An evaluation that was promoted and then failed is one failure, not also a success."""
    ended = [make_ended(trial, 1.0, params={"lr": 0.01 * (1 + trial)}) for trial in range(60)]
    failed = [
        make_ended(100 + trial, math.inf, "failed", params=ended[trial].params, retry_of=trial)
        for trial in range(50, 60)
    ]
    promoted = [replace(e, state="promoted") if e.trial >= 50 else e for e in ended]
    distributions = {"lr": SPACE.make_distributions()["lr"]}
    region = find_failure_region([*promoted, *failed], distributions, failed)
    assert region is not None
    assert (region.conditions, len(region.failed), region.ended) == (["lr >= 0.51"], 10, 10)


def test_failure_advice_shows_a_failure_of_the_region() -> None:
    ended = fail_where(draw_search(60, compute_distant_loss), lambda p: p["layers"] >= 5)
    other = make_ended(
        60,
        math.inf,
        "failed",
        failure="rank 0: OSError: no data",
        params={**ended[0].params, "layers": 1},
    )
    advice = find_by_kind(make_result([*ended, other]), "failures")
    assert advice is not None
    assert "OSError" not in advice.evidence
    assert (
        advice.command == f"hpo show runs/x {[e for e in ended if e.state == 'failed'][-1].trial}"
    )


@pytest.mark.parametrize(
    ("first", "second", "merged"),
    [
        (
            "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0",
            "CUDA out of memory. Tried to allocate 1.5 GiB. GPU 1",
            "CUDA out of memory. Tried to allocate .... GPU ...",
        ),
        ("rank 0, a.py:3: KeyError: 'a'", "rank 1, a.py:3: KeyError: 'a'", "a.py:3: KeyError: 'a'"),
        ("2 of 64 at 0x7fab12", "3 of 64 at 0x8c", "... of 64 at ..."),
        (
            "a.py:3: RuntimeError: Connection closed by peer [127.0.0.1]:39591",
            "a.py:3: RuntimeError: Connection closed by peer [127.0.0.1]:4802",
            "a.py:3: RuntimeError: Connection closed by peer [127.0.0.1]:...",
        ),
        ("a.py:3: KeyError: 'a'", "a.py:4: KeyError: 'a'", None),
        ("a.py:3: KeyError: 'conv1'", "a.py:3: KeyError: 'conv2'", None),
        ("the trainer ended with status 1", "the trainer ended with status 2", None),
        ("was ended by SIGKILL", "was ended by SIGSEGV", None),
    ],
)
def test_reasons_that_differ_in_numbers_are_equal(
    first: str, second: str, merged: str | None
) -> None:
    failed = [
        make_ended(trial, math.inf, "failed", failure=text, ended=10.0 - trial)
        for trial, text in enumerate([first, second])
    ]
    kinds = group_failures(failed)
    assert [kind.reason for kind in kinds] == ([first, second] if merged is None else [merged])
    assert kinds[0].latest.trial == 0, "the latest comes last"


def test_failing_parameter_is_not_to_be_widened() -> None:
    ended = make_crowded_search(64, compute_distant_loss, lr=1.0)
    assert find_by_kind(make_result(ended), "bounds") is not None
    failed = fail_where(ended, lambda p: p["lr"] > 0.3 and p["layers"] >= 4)
    best = sorted((e for e in failed if e.state == "complete"), key=lambda e: e.loss)[:5]
    assert all(evaluation.params["lr"] == 1.0 for evaluation in best)
    advice = {found.kind: found for found in find_advice(make_result(failed))}
    assert "lr >= " in advice["failures"].text
    assert "bounds" not in advice


def test_failure_advice_handles_inactive_parameters() -> None:
    ended = [
        make_ended(
            trial,
            1.0,
            params={"act": "ab"[trial % 2]} | ({"lr": 0.01 * (1 + trial)} if trial % 2 else {}),
        )
        for trial in range(60)
    ]
    advice = find_by_kind(
        make_result(fail_where(ended, lambda p: p.get("lr", 0) > 0.3)), "failures"
    )
    assert advice is not None
    assert advice.text.startswith("Exclude lr >= 0.32 from")


def test_failure_advice_is_absent_without_a_region() -> None:
    drawn = draw_search(60, compute_distant_loss)
    assert find_by_kind(make_result(drawn), "failures") is None
    assert find_by_kind(make_result(fail_where(drawn, lambda _: True)), "failures") is None
    assert (
        find_by_kind(make_result(fail_where(drawn[:5], lambda p: p["act"] == "b")), "failures")
        is None
    )


def test_failure_advice_on_random_failures_is_rare() -> None:
    alarms = 0
    for seed in range(300):
        draws = random.Random(seed)
        ended = [
            make_ended(
                trial, e.loss, "failed" if draws.random() < 0.2 else "complete", params=e.params
            )
            for trial, e in enumerate(draw_search(40, compute_distant_loss, seed))
        ]
        alarms += find_by_kind(make_result(ended), "failures") is not None
    assert alarms <= 6, "at most 1% is expected"


def test_epoch_advice_if_losses_still_fall_doubles_epochs() -> None:
    advice = find_by_kind(make_result(make_curves(compute_falling_loss)), "epochs")
    assert advice is not None
    assert advice.text.startswith("Train for more epochs, in a new run")
    assert advice.evidence.endswith("; the last 2 epochs lowered it by 11%.")
    assert advice.command == "run_islands.py my.py --set epochs=20 --set 'data=my data'"
    mixed = make_curves(compute_falling_loss)
    mixed[3] = replace(mixed[3], curve={**mixed[3].curve, 9: 0.71, 10: 0.60})
    other = find_by_kind(make_result(mixed), "epochs")
    assert other is not None
    assert other.evidence.endswith("lowered it by 11% to 14%.")


def test_epoch_advice_after_other_epochs_has_no_command() -> None:
    now = SessionEntry("", "search_space-1.py", "0" * 64, settings={"epochs": 10})
    sessions = (replace(now, settings={"epochs": 5}), now)
    known = make_result(make_curves(compute_falling_loss))
    known = replace(known, manifest=replace(known.manifest, sessions=sessions))
    advice = find_by_kind(known, "epochs")
    assert advice is not None
    assert advice.command == ""


@pytest.mark.parametrize("epochs", [None, "10", True, 10.0, 0, -1, [10]])
def test_epoch_advice_without_integer_epochs_has_no_command(epochs: object) -> None:
    for settings in ({"epochs": epochs}, {}):
        advice = find_by_kind(
            make_result(make_curves(compute_falling_loss), {"settings": settings}), "epochs"
        )
        assert advice is not None
        assert advice.command == ""


def test_epoch_advice_is_absent_if_losses_converged() -> None:
    assert (
        find_by_kind(make_result(make_curves(lambda epoch: 0.1 + 2.0**-epoch)), "epochs") is None
    ), "more epochs would gain little"
    assert find_by_kind(make_result(make_curves(compute_falling_loss, epochs=3)), "epochs") is None
    assert find_by_kind(make_result(make_curves(compute_falling_loss)[:4]), "epochs") is None
    assert (
        find_by_kind(
            make_result(make_curves(lambda epoch: compute_falling_loss(min(epoch, 9)))), "epochs"
        )
        is None
    )
    jumps = make_curves(compute_falling_loss)
    jumps[4] = replace(jumps[4], curve={**jumps[4].curve, 3: 0.01})
    assert find_by_kind(make_result(jumps), "epochs") is None, (
        "one of the best five was lower at an earlier epoch"
    )
    assert (
        find_by_kind(
            make_result(make_curves(compute_falling_loss, imported_from="runs/before")), "epochs"
        )
        is None
    ), "imported evaluations may have other epochs"
    assert (
        find_by_kind(
            make_result(make_curves(lambda epoch: -compute_falling_loss(11 - epoch))), "epochs"
        )
        is not None
    ), "below zero"


def test_confirm_advice_if_second_best_is_close() -> None:
    advice = find_by_kind(
        make_result([make_ended(0, 0.500), make_ended(1, 0.504), make_ended(2, 0.9)]), "confirm"
    )
    assert advice is not None
    assert (
        advice.evidence
        == "The losses of trials 0 and 1 differ by 0.79%, and each was trained once, with one seed."
    )
    assert advice.command == "run_islands.py my.py --run-dir runs/x --resume --confirm-seeds 3"
    same = find_by_kind(make_result([make_ended(0, 0.0), make_ended(1, 0.0)]), "confirm")
    assert same is not None
    assert "are the same" in same.evidence


def test_equal_losses_are_advised_to_be_checked() -> None:
    equal = [make_ended(trial, 5.25) for trial in range(4)]
    (advice,) = find_advice(make_result(equal))
    assert (advice.kind, advice.command) == ("equal", "")
    assert advice.evidence.startswith("All 4 losses are 5.25, so they do not depend on the hyper")
    other = find_advice(make_result([*equal[:3], make_ended(3, 5.26)]))
    assert [each.kind for each in other] == ["confirm"]


def test_advice_ignores_evaluations_with_a_parent() -> None:
    heirs = [replace(each, inherits=each.trial - 1) for each in make_flat_search()[1:]]
    assert find_by_kind(make_result(make_flat_search()), "confirm")
    assert find_by_kind(make_result([make_flat_search()[0], *heirs]), "confirm") is None, (
        "this does not depend on the options of the last session"
    )
    still = make_curves(compute_falling_loss)
    assert find_by_kind(make_result(still), "epochs")
    assert (
        find_by_kind(make_result([*still[:-1], replace(still[-1], inherits=0)]), "epochs") is None
    )
    near = make_crowded_search(64, compute_distant_loss, lr=1.0)
    assert find_by_kind(make_result(near), "bounds")
    assert (
        find_by_kind(
            make_result([replace(each, inherits=0) if each.trial else each for each in near]),
            "bounds",
        )
        is None
    )


def test_confirm_advice_is_absent_if_clear_or_still_running() -> None:
    close = [make_ended(0, 0.500), make_ended(1, 0.504)]
    assert find_by_kind(make_result([make_ended(0, 0.5), make_ended(1, 0.52)]), "confirm") is None
    assert find_by_kind(make_result(close, {"budget": 3}), "confirm") is None
    assert (
        find_by_kind(make_result(close, {"budget": 3}, last_summary={"exhausted": True}), "confirm")
        is not None
    )
    assert find_by_kind(make_result(close, is_in_use=True, last_summary={}), "confirm") is None
    assert find_by_kind(make_result(close, {"confirm_seeds": 2}), "confirm") is None, (
        "the confirmation has not run yet"
    )
    assert (
        find_by_kind(
            make_result([make_ended(0, 0.5), make_ended(1, math.inf), make_ended(2, math.nan)]),
            "confirm",
        )
        is None
    )


def make_confirmed(*groups: Sequence[float]) -> RunSnapshot:
    """Return the result of a run whose best individuals were trained with other seeds.

    `groups` has their losses.
    """
    evaluations = [make_ended(trial, 0.1 * trial) for trial in range(len(groups))]
    confirmations = [
        make_ended(index, loss, confirms=trial, seed=index)
        for trial, group in enumerate(groups)
        for index, loss in enumerate(group)
    ]
    return make_result(evaluations, {"confirm_seeds": len(groups[0])}, confirmations=confirmations)


def space_losses(mean: float, deviation: float, count: int) -> list[float]:
    """Return evenly spaced losses with this mean and this standard deviation."""
    steps = [index - (count - 1) / 2 for index in range(count)]
    return [mean + deviation * step / statistics.stdev(steps) for step in steps]


def test_advice_if_bounds_are_wide_asks_for_more_seeds() -> None:
    advice = find_by_kind(
        make_confirmed(
            space_losses(0.110, 0.010, 3), space_losses(0.112, 0.010, 3), space_losses(0.9, 0.01, 3)
        ),
        "confirm",
    )
    assert advice is not None
    assert (
        advice.text
        == "Confirm with 7 seeds, or take trial 0, which is worse than the best by 0.01798 at most."
    )
    assert advice.evidence == (
        "With 3 other seeds each, trials 0 and 1 may be the best, and none is certain to be as "
        "good within 0.01, the standard deviation of trial 0 between seeds."
    )
    assert advice.command == "run_islands.py my.py --run-dir runs/x --resume --confirm-seeds 7"
    enough = [space_losses(mean, 0.010, 7) for mean in (0.110, 0.112, 0.9)]
    assert find_by_kind(make_confirmed(*enough), "confirm") is None, (
        "the advised number of seeds is enough"
    )


def test_advice_names_the_cheapest_only_of_trials_within_bounds() -> None:
    groups = [space_losses(mean, 0.13, 30) for mean in (0.683, 0.69, 0.75, 1.0, 1.719)]
    advice = find_by_kind(make_confirmed(*groups), "confirm")
    assert advice is not None
    assert advice.text == "Take the cheapest of trials 0 and 1."
    assert (
        "as good as the best within 0.13, the standard deviation of trial 0 between seeds"
        in advice.evidence
    )
    assert advice.command == ""


def test_advice_if_bounds_stay_wide_takes_the_first_trial() -> None:
    advice = find_by_kind(make_confirmed([0.0, 0.0, 0.0], [-0.1, 0.0, 0.1]), "confirm")
    assert advice is not None
    assert advice.text.startswith("Take trial 0, which is worse than the best by 0.")
    assert "That would need more than 30 seeds." in advice.evidence
    assert advice.command == ""


def test_confirm_advice_asks_for_three_seeds_at_least() -> None:
    few = find_by_kind(make_confirmed([0.1], [0.2]), "confirm")
    assert few is not None
    assert few.command.endswith("--resume --confirm-seeds 3")
    assert find_by_kind(make_confirmed([0.10, 0.12, 0.11], [0.5, 0.51, 0.52]), "confirm") is None
    assert find_by_kind(make_confirmed([0.10, 0.12, 0.11]), "confirm") is None
    half = make_confirmed([0.10, 0.12, 0.11], [0.11, 0.13, 0.125])
    waiting = replace(
        half, confirmations=[*half.confirmations, make_ended(9, 0.1, "waiting", confirms=1)]
    )
    assert find_by_kind(waiting, "confirm") is None


def test_advice_compares_huge_and_tiny_losses() -> None:
    tiny, huge = ([5e-324, 0.0], [0.0, 0.0]), ([1e300] * 3, [1e300, 9e299, 1e300])
    for groups in (([1e308, -1e308], [1e308, -1e307]), tiny, huge):
        advice = find_by_kind(make_confirmed(*groups), "confirm")
        assert advice is not None
        assert "trials 0 and 1 may be" in advice.evidence.replace(
            "trials 1 and 0", "trials 0 and 1"
        )


def test_worker_advice_describes_workers_that_have_left() -> None:
    left = [
        "worker 2 (rank 2 on n1, GPU 7) has left the run",
        "worker 3 (rank 3 on n1, GPU 8) has left the run",
    ]
    advice = find_advice(make_result([make_ended(0, 1.0)], broken_workers=left))[0]
    assert (advice.kind, advice.evidence) == ("worker", f"{left[0]}. {left[1]}.")
    assert find_by_kind(make_result([make_ended(0, 1.0)]), "worker") is None


def test_idle_advice_if_workers_wait_at_the_end() -> None:
    evaluations = [make_ended(trial, 1.0) for trial in range(5)]
    evaluations[4] = replace(evaluations[4], ended=200.0)
    advice = find_by_kind(make_result(evaluations, last_summary=make_session_times(0.29)), "idle")
    assert advice is not None
    assert advice.text == "Use fewer workers of more ranks each, or more evaluations."
    assert advice.evidence.startswith(
        "Workers were busy 29% of the time. They were mostly idle at the end, while other"
    )
    assert (
        advice.command
        == "run_islands.py my.py --set epochs=10 --set 'data=my data' --ranks-per-worker 4"
    )
    odd = find_by_kind(
        make_result(
            evaluations,
            {"layout": {"ranks": 9, "ranks_per_worker": 3, "islands": 1}},
            last_summary=make_session_times(0.29),
        ),
        "idle",
    )
    assert odd is not None
    assert odd.command == ""


def test_idle_advice_if_evaluations_are_short() -> None:
    def advise(seconds: float) -> Advice | None:
        evaluations = [
            replace(evaluation, ended=evaluation.started + seconds)
            for evaluation in make_flat_search(80)
        ]
        return find_by_kind(
            make_result(evaluations, last_summary=make_session_times(seconds / 10)), "idle"
        )

    advice = advise(0.2)
    assert advice is not None
    assert "evaluations are too short for this many workers" in advice.text
    assert "an evaluation takes 0.2 s, and then its worker waits for" in advice.evidence
    assert advise(3.0) is None, "the cause of the pauses is not known"


def test_idle_advice_is_absent_if_busy_or_short() -> None:
    evaluations = make_flat_search(80)
    for ended in (
        make_session_times(0.5),
        make_session_times(0.1, 59.0),
        make_session_times(None),
        make_session_times("0.1"),
        make_session_times(math.nan),
        make_session_times(True),
        make_session_times(-1),
        {},
    ):
        assert find_by_kind(make_result(evaluations, last_summary=ended), "idle") is None, ended
    assert (
        find_by_kind(make_result(evaluations[:4], last_summary=make_session_times(0.1)), "idle")
        is None
    )
    assert (
        find_by_kind(
            make_result(
                evaluations,
                {"layout": {"ranks": 2, "ranks_per_worker": 2, "islands": 1}},
                last_summary=make_session_times(0.1),
            ),
            "idle",
        )
        is None
    )


LOSSES: dict[str, list[float]] = {
    "none": [],
    "one": [1.0],
    "zero": [0.0] * 40,
    "huge": [1e300 * (-1) ** index for index in range(40)],
    "largest": [1.7e308, -1.7e308] * 20,
    "tiny": [5e-324 * index for index in range(40)],
    "not finite": [math.nan, math.inf, -math.inf] * 15,
    "negative": [-1.0 - index / 100 for index in range(40)],
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("epochs", [0, 1, 4, 9])
def test_advice_accepts_any_losses(name: str, epochs: int) -> None:
    states = ("complete", "complete", "pruned", "failed", "running", "waiting", "interrupted")
    for kinds in (states[:1], states):
        evaluations = []
        for trial, loss in enumerate(LOSSES[name]):
            curve = {epoch: loss * (epochs - epoch) for epoch in range(1, epochs + 1)}
            origin = "runs/before" if trial % 5 == 4 else ""
            evaluations.append(
                make_ended(
                    trial, loss, kinds[trial % len(kinds)], curve=curve, imported_from=origin
                )
            )
        for advice in find_advice(make_result(evaluations)):
            assert advice.text.endswith(".")
            assert "nan" not in advice.evidence


def test_advice_accepts_edited_run_json_and_summary() -> None:
    evaluations = [
        *make_flat_search(),
        *(
            replace(evaluation, trial=evaluation.trial + 64)
            for evaluation in make_curves(compute_falling_loss)
        ),
    ]
    huge = [
        *VALUES,
        "'",
        "run_islands.py '",
        "x.py " * 999,
        {"ranks": 10**30, "ranks_per_worker": 1},
        [1] * 3,
    ]
    for value in huge:
        for name in ("command", "search_space"):
            if isinstance(value, str):
                assert len(find_advice(make_result(evaluations, {name: value}))) == 1
        for name in ("worker_busy_fraction", "wall_seconds", "exhausted", "stopped"):
            assert find_advice(
                make_result(evaluations, last_summary={**make_session_times(0.1), name: value})
            )
        find_advice(make_result(evaluations, {"settings": {"epochs": value, "\x1b": value}}))
        text = value if isinstance(value, str) else json.dumps(value)
        more_epochs = find_by_kind(
            make_result(make_curves(compute_falling_loss), {"set": {"a": text}}), "epochs"
        )
        assert more_epochs is not None
        assert (more_epochs.command == "") == (len(text) > 900)


def test_resume_command_of_a_script_keeps_its_options() -> None:
    options = ["--space=lr=Float(1e-4, 1e-1)", "--loss=val_loss=(\\S+)", "--first-report=2"]
    pairs = [
        "--space",
        "act=Categorical('a', 'b')",
        "--flag",
        "amp",
        "--resume-args",
        "--resume {folder}/last.pt",
        *(word for each in PROGRAM_OPTIONS.values() for word in (each.flags, "any")),
    ]
    program = ["--", "train.py", "--epochs", "3", "--space", "x"]
    words = [
        "hpo",
        "search",
        *options,
        "--evaluations",
        "8",
        *pairs,
        "--run-dir=runs/old",
        "--pruner",
        "asha",
        *program,
    ]
    run_result = make_result(
        [make_ended(0, 1.0)],
        {"command": shlex.join(words), "search_space": "train.py", "lacks_seed": True},
    )
    assert sorted(shlex.split(run_result.format_resume_command("--confirm-seeds", "3"))) == sorted(
        [
            "hpo",
            "search",
            *pairs,
            *options,
            "--run-dir",
            "runs/x",
            "--resume",
            "--confirm-seeds",
            "3",
            *program,
        ]
    )
    assert shlex.split(run_result.format_resume_command())[-len(program) :] == program
    assert shlex.split(run_result.format_confirm_command(3))[-len(program) - 2 :] == [
        *program,
        "--seed",
        "{seed}",
    ]
    seeded = make_result(
        [make_ended(0, 1.0)],
        {"command": shlex.join([*words, "--s={seed}"]), "search_space": "train.py"},
    )
    assert seeded.format_confirm_command(3) == seeded.format_resume_command("--confirm-seeds", "3")
    bare = shlex.join(["run_islands.py", *options[:1], *program])
    run_result = make_result([make_ended(0, 1.0)], {"command": bare, "search_space": "train.py"})
    assert shlex.split(run_result.format_resume_command()) == [
        "run_islands.py",
        *options[:1],
        "--run-dir",
        "runs/x",
        "--resume",
        *program,
    ]


def test_confirm_command_needs_a_script_that_takes_a_seed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    about = {"search_space": str(script), "lacks_seed": True}
    command = f"hpo search --loss x -- {script} --epochs 3"
    run_result = make_result([make_ended(0, 1.0)], {**about, "command": command})
    for source, takes_seed in (("parser.add_argument('--seed')", True), ("seed = 3", False)):
        script.write_text(source)
        assert bool(run_result.format_confirm_command(3)) == takes_seed
    in_file = make_result([make_ended(0, 1.0)], {**about, "command": "hpo search search.py"})
    assert in_file.format_confirm_command(3) == "", "its search file must be changed first"


def test_advised_commands_are_quoted_for_the_shell() -> None:
    close = [make_ended(0, 0.500), make_ended(1, 0.504)]
    run_result = make_result(
        close, {"command": "'my runs/go.py' 'a b.py'", "search_space": "a b.py"}
    )
    advice = find_by_kind(replace(run_result, run_dir=Path("a'b; c")), "confirm")
    assert advice is not None
    words = ["my runs/go.py", "a b.py", "--run-dir", "a'b; c", "--resume", "--confirm-seeds", "3"]
    assert shlex.split(advice.command) == words
    bare = find_by_kind(make_result(close, {"command": "rm -rf /"}), "confirm")
    assert bare is not None
    assert bare.command == "--run-dir runs/x --resume --confirm-seeds 3"
    asked = find_by_kind(make_result(close, {"command": ""}), "confirm")
    assert asked is not None
    assert asked.command == "", "ask and tell have no command"
    installed = find_by_kind(
        make_result(close, {"command": "hpo search 'a b.py' --seed 3", "search_space": "a b.py"}),
        "confirm",
    )
    assert installed is not None
    assert installed.command == "hpo search 'a b.py' --run-dir runs/x --resume --confirm-seeds 3"
    default = find_by_kind(
        make_result(
            close, {"command": "run_islands.py", "search_space": "search_spaces/digits_cnn.py"}
        ),
        "confirm",
    )
    assert default is not None
    assert default.command.startswith("run_islands.py --run-dir")


def test_format_percent_and_list_are_readable() -> None:
    assert [format_percent(share) for share in (0.0, 1e-9, 0.0123, 0.5, 0.999, 2.0)] == [
        *("0%", "less than 0.1%", "1.2%", "50%", "100%", "200%"),
    ]
    assert [format_list(range(count)) for count in (1, 2, 3, 7)] == [
        "0",
        "0 and 1",
        "0, 1 and 2",
        "0, 1, 2, 3, 4 and 2 more",
    ]


@pytest.fixture
def advised_run(tmp_path: Path) -> Path:
    """Return the directory of a run that gives advice."""
    record = make_run(
        tmp_path / "run",
        budget=5,
        command="run_islands.py --set '<b>=\x1b[31m'",
        set={"<b>": "\x1b[31m"},
    )
    for trial in range(5):
        curve = {epoch: (1 + trial / 1000) * compute_falling_loss(epoch) for epoch in range(1, 5)}
        add_evaluation(record, curve=curve, began=START_SECONDS + trial)
    return tmp_path / "run"


def test_tables_and_report_show_advice(
    advised_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call_hpo("top", advised_run) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    tables, advice = out.split("\nWhat to do next\n")
    assert "5 complete, of 5" in tables
    assert advice.count("- ") == 2
    assert f"      run_islands.py --run-dir {advised_run} --resume --confirm-seeds 3\n" in advice
    assert "      run_islands.py --set '<b>=\\x1b[31m' --set epochs=8\n" in advice
    assert (
        max(map(len, (line for line in advice.splitlines() if not line.startswith("      "))))
        <= 100
    )
    page = render_report(RunReader(advised_run), 10, START_SECONDS)
    section = page.split("<h3>What to do next</h3>")[1].split("</section>")[0]
    assert section.count("<li>") == section.count("<pre") == 2
    assert (
        "<strong>Train the best again with other seeds before you rely on the winner.</strong>"
        in section
    )
    assert "&lt;b&gt;" in section
    assert "<b>" not in page
    assert "<code>--confirm-seeds 3</code>" not in page, "the advice already contains it"


def test_finalize_prints_advice_before_the_report_path(
    advised_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finalize_run(advised_run, None, load_problem(QUICK), None, is_stopped=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["", "What to do next"]
    assert lines[-2:] == ["", f"The report is {advised_run}/report.html"]


def test_tables_and_report_without_advice_show_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = make_run(tmp_path / "run")
    for loss in (0.5, 0.7, 0.9):
        add_evaluation(record, curve={1: loss + 1, 2: loss})
    add_evaluation(record, TrialState.FAIL, failure="no")
    assert call_hpo("top", tmp_path / "run") == 0
    finalize_run(tmp_path / "run", None, load_problem(QUICK), None, is_stopped=True)
    print_advice([])
    assert capsys.readouterr().out.endswith(f", of 64\nThe report is {tmp_path}/run/report.html\n")
    page = (tmp_path / "run" / "report.html").read_text("utf-8")
    assert "What to do next" not in page
    assert 'class="advice"' not in page
    assert "<code>--confirm-seeds 3</code>" in page


def test_advice_of_a_running_session_omits_confirm(
    advised_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunReader(advised_run)
    assert [advice.kind for advice in run.find_advice()] == ["confirm", "epochs"]
    monkeypatch.setattr(type(run.run_dir), "is_in_use", True)
    assert [advice.kind for advice in run.find_advice()] == ["epochs"]
    run.run_dir.summary_json.write_text("{}")
    assert [advice.kind for advice in run.find_advice()] == ["epochs"], "a user has edited it"
    run.run_dir.summary_json.write_text('{"stopped": null}')
    assert [advice.kind for advice in run.find_advice()] == ["confirm", "epochs"], (
        "the session has ended"
    )
