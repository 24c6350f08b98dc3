"""What follows from the result of a run: it is said with its evidence, and where nothing follows, nothing is said."""

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

from hpo import Categorical, Float, Int, SearchSpace
from hpo.results.advice.advisor import find_advice
from hpo.results.advice.run_result import Advice, RunResult, format_list, format_percent
from hpo.results.reader import RunReader
from hpo.run.finalize import finalize_run
from hpo.store.evaluations import Evaluation
from hpo.views.page.html_report import render_report
from hpo.views.summary_tables import print_advice
from tests.support.fuzz import VALUES
from tests.support.in_process_template import load_problem
from tests.support.launch import call_hpo
from tests.support.runs import QUICK, START_SECONDS, add_evaluation, make_manifest, make_run

SPACE = SearchSpace(lr=Float(1e-3, 1.0, log=True), gamma=Float(0.0, 1.0), layers=Int(1, 6), act=Categorical("a", "b"))
ABOUT: dict[str, Any] = {
    "budget": 1,
    "confirm_seeds": 0,
    "format": 1,
    "settings": {"epochs": 10},
    "set": {"epochs": "10", "data": "my data"},
    "layout": {"ranks": 8, "ranks_per_worker": 2, "islands": 2},
    "command": "run_islands.py my.py --set epochs=10",
    "search_space": "my.py",
}


def one(trial: int, loss: float, state: str = "complete", **others: Any) -> Evaluation:
    """Make an evaluation that took ten seconds, beside three others."""
    params = others.pop("params", {"lr": 0.03, "gamma": 0.5, "layers": 3, "act": "a"})
    at = {"started": 10.0 * (trial // 4), "ended": 10.0 * (trial // 4) + 10.0, "seconds": 10.0}
    place = {"island": 0, "worker": trial % 4, "generation": trial // 4}
    return Evaluation(trial, state, math.inf if state == "failed" else loss, params, **{**place, **at, **others})


def result(evaluations: Sequence[Evaluation], about: Mapping[str, Any] | None = None, **others: Any) -> RunResult:
    """Make the result of a run that has ended, and spent its budget."""
    given: dict[str, Any] = {
        "confirmations": [],
        "distributions": SPACE.make_distributions(),
        "session_start": -math.inf,
        "last_summary": {"stopped": None},
        "is_running": False,
        **others,
    }
    return RunResult(Path("runs/x"), make_manifest(**{**ABOUT, **(about or {})}), evaluations, **given)


def told(known: RunResult, kind: str) -> Advice | None:
    """Return the advice of a kind."""
    found = [advice for advice in find_advice(known) if advice.kind == kind]
    assert len(found) <= 1
    return found[0] if found else None


def drawn(
    count: int, loss: Callable[[dict[str, Any]], float], seed: int = 0, space: SearchSpace = SPACE
) -> list[Evaluation]:
    """Make a random search."""
    rng = random.Random(seed)
    return [one(trial, loss(params), params=params) for trial in range(count) for params in [space.draw(rng)]]


def crowded(count: int, loss: Callable[[dict[str, Any]], float], **bound: Any) -> list[Evaluation]:
    """Make a search that draws at random at first, and then stays at a bound."""
    evaluations = drawn(count, loss)
    late = [{**evaluation.params, **bound} for evaluation in evaluations[count // 2 :]]
    ended = [one(trial, loss(params), params=params) for trial, params in enumerate(late, start=count // 2)]
    return [*evaluations[: count // 2], *ended]


def far(params: Mapping[str, Any]) -> float:
    """Return a loss that is lowest far above the range of the learning rate."""
    return float((math.log10(params["lr"]) - 1) ** 2 + 0.1 * (params["gamma"] - 0.5) ** 2)


def test_the_best_at_a_bound_widen_the_search_space() -> None:
    advice = told(result(crowded(64, far, lr=1.0)), "bounds")
    assert advice is not None
    assert advice.text == "Widen the search space, if such values make sense: lr above 1."
    assert advice.evidence.startswith("Of the best 5, 5 have lr at its upper bound; and the nearer to it,")
    assert advice.command == "run_islands.py my.py --set epochs=10 --set 'data=my data' --warm-start runs/x"


def test_a_lower_bound_and_one_of_an_int_are_told_by_their_names() -> None:
    def loss(params: Mapping[str, Any]) -> float:
        return float(params["gamma"] + 0.1 * (params["layers"] + (params["act"] == "b")))

    advice = told(result(crowded(64, loss, gamma=0.0, layers=1)), "bounds")
    assert advice is not None
    assert advice.text.endswith(": gamma below 0 and layers below 1.")
    assert "5 have gamma at its lower bound and 5 have layers at its lower bound" in advice.evidence


@pytest.mark.parametrize(
    ("parameter", "bound"),
    [(Float(-8e307, 8e307), "8e+307"), (Float(5e-324, 1e308, log=True), "1e+308"), (Int(0, 2**53), "9.007e+15")],
)
def test_ranges_of_any_size_have_bounds(parameter: Float | Int, bound: str) -> None:
    low, high = parameter.limits
    space, step = SearchSpace(x=parameter), high / 50 - low / 50
    values = [{"x": parameter.decode(high - step * max(0, trial - 9))} for trial in range(60)]
    evaluations = [one(trial, float(trial), params=params) for trial, params in enumerate(values)]
    advice = told(result(evaluations, distributions=space.make_distributions()), "bounds")
    assert advice is not None
    assert advice.text.endswith(f": x above {bound}.")


def test_logarithmic_integers_are_not_widened_below_one() -> None:
    def loss(params: Mapping[str, Any]) -> float:
        return float(params["x"] + params["y"])

    space = SearchSpace(x=Int(1, 9, log=True), y=Int(2, 9, log=True))
    evaluations = drawn(60, loss, space=space)
    evaluations += [one(trial, 2.9, params={"x": 1, "y": 2}) for trial in range(60, 70)]
    advice = told(result(evaluations, distributions=space.make_distributions()), "bounds")
    assert advice is not None
    assert advice.text.endswith(": y below 2.")


def test_a_bound_that_does_not_matter_is_none() -> None:
    def loss(params: Mapping[str, Any]) -> float:
        return float((params["gamma"] - 0.5) ** 2 + 0.01)

    late = [replace(evaluation, loss=evaluation.loss / 100) for evaluation in crowded(128, loss, lr=1.0)[64:]]
    evaluations = [*drawn(64, loss), *late]
    best = sorted(evaluations, key=lambda evaluation: evaluation.loss)[:5]
    assert all(evaluation.params["lr"] == 1.0 for evaluation in best), "they crowd"
    assert told(result(evaluations), "bounds") is None


def test_few_evaluations_and_few_values_say_nothing_of_bounds() -> None:
    assert told(result(crowded(19, far, lr=1.0)), "bounds") is None
    space = SearchSpace(n=Int(1, 3), x=Float(0.0, 1.0))
    few = drawn(64, lambda params: float(params["n"] + params["x"] * (1 - params["x"])), space=space)
    best = sorted(few, key=lambda evaluation: evaluation.loss)[:5]
    assert all(evaluation.params["n"] == 1 for evaluation in best)
    assert told(result(few, distributions=space.make_distributions()), "bounds") is None


def test_random_searches_hardly_ever_widen_a_space_in_vain() -> None:
    def loss(params: Mapping[str, Any]) -> float:
        return float((math.log10(params["lr"]) + 1.5) ** 2 + (params["gamma"] - 0.5) ** 2)

    alarms = sum(told(result(drawn(40, loss, seed)), "bounds") is not None for seed in range(300))
    assert alarms <= 3


def flat(count: int = 64, found: int = 10, step: float = 1e-4) -> list[Evaluation]:
    """Make a search that finds its best early; the others are so far apart."""
    losses = [0.5 + step * (1 + (7 * place) % count) for place in range(count)]
    losses[found] = 0.5
    return [one(trial, loss) for trial, loss in enumerate(losses)]


def test_a_flat_half_of_a_search_says_that_it_is_enough() -> None:
    advice = told(result(flat()), "flat")
    assert advice is not None
    assert advice.text.startswith("Stop here, or change the search space")
    assert "The best was found after 11 of 64 evaluations, and nothing better since." in advice.evidence
    assert "may lower the lowest by less than 0.1%" in advice.evidence
    assert advice.command == ""


def test_a_search_that_may_find_more_is_not_called_flat() -> None:
    assert told(result(flat(found=40)), "flat") is None, "the best is of the second half"
    assert told(result(flat(step=0.02)), "flat") is None, "the best losses are far apart"
    assert told(result(flat(29)), "flat") is None
    assert told(result(flat(), is_running=True, last_summary={}), "flat") is None
    assert told(result(flat(), last_summary={"exhausted": True}), "flat") is None
    pruned = [replace(evaluation, state="pruned") if evaluation.trial % 2 else evaluation for evaluation in flat(60)]
    assert told(result(pruned), "flat") is not None
    assert told(result(pruned[1:]), "flat") is None, "29 are complete"


def test_what_was_taken_over_was_there_before_the_first_evaluation() -> None:
    before = replace(one(0, 0.49), imported_from="runs/before", started=math.nan, ended=math.nan)
    evaluations = [before, *(replace(evaluation, trial=evaluation.trial + 1) for evaluation in flat(found=60))]
    assert told(result(evaluations[1:]), "flat") is None
    close = [replace(evaluation, loss=0.49 + evaluation.loss / 1e6) for evaluation in evaluations[1:]]
    advice = told(result([before, *close]), "flat")
    assert advice is not None
    assert advice.evidence.startswith("The best was found before this run, and nothing better since.")


def with_curves(curve: Callable[[int], float], epochs: int = 10, **others: Any) -> list[Evaluation]:
    """Make evaluations with the loss after each epoch, each a little higher than the one before."""
    curves = [{epoch: (1 + trial / 100) * curve(epoch) for epoch in range(1, epochs + 1)} for trial in range(8)]
    return [one(trial, min(curve.values()), curve=curve, **others) for trial, curve in enumerate(curves)]


def falling(epoch: int) -> float:
    """Return a loss that halves in ten epochs."""
    return float(0.1 + 2 ** (-epoch / 10))


def test_losses_that_still_fall_ask_for_more_epochs() -> None:
    advice = told(result(with_curves(falling)), "epochs")
    assert advice is not None
    assert advice.text.startswith("Train for more epochs, in a new run")
    assert advice.evidence.endswith("; the last quarter of the epochs lowered it by 11%.")
    assert advice.command == "run_islands.py my.py --set epochs=20 --set 'data=my data'"
    mixed = with_curves(falling)
    mixed[3] = replace(mixed[3], curve={**mixed[3].curve, 9: 0.71, 10: 0.60})
    other = told(result(mixed), "epochs")
    assert other is not None
    assert other.evidence.endswith("lowered it by 11% to 14%.")


@pytest.mark.parametrize("epochs", [None, "10", True, 10.0, 0, -1, [10]])
def test_without_a_whole_number_of_epochs_there_is_nothing_to_type(epochs: object) -> None:
    for settings in ({"epochs": epochs}, {}):
        advice = told(result(with_curves(falling), {"settings": settings}), "epochs")
        assert advice is not None
        assert advice.command == ""


def test_losses_that_have_come_to_rest_ask_for_nothing() -> None:
    assert told(result(with_curves(lambda epoch: 0.1 + 2.0**-epoch)), "epochs") is None, "little is left to gain"
    assert told(result(with_curves(falling, epochs=3)), "epochs") is None
    assert told(result(with_curves(falling)[:4]), "epochs") is None
    assert told(result(with_curves(lambda epoch: falling(min(epoch, 9)))), "epochs") is None
    jumps = with_curves(falling)
    jumps[4] = replace(jumps[4], curve={**jumps[4].curve, 3: 0.01})
    assert told(result(jumps), "epochs") is None, "one of the best five was lower before"
    assert told(result(with_curves(falling, imported_from="runs/before")), "epochs") is None, "of other epochs, perhaps"
    assert told(result(with_curves(lambda epoch: -falling(11 - epoch))), "epochs") is not None, "below zero"


def test_a_runner_up_that_is_close_asks_for_other_seeds() -> None:
    advice = told(result([one(0, 0.500), one(1, 0.504), one(2, 0.9)]), "confirm")
    assert advice is not None
    assert advice.evidence == "The losses of trials 0 and 1 differ by 0.79%, and each was trained once, with one seed."
    assert advice.command == "run_islands.py my.py --run-dir runs/x --resume --confirm-seeds 3"
    same = told(result([one(0, 0.0), one(1, 0.0)]), "confirm")
    assert same is not None
    assert "are the same" in same.evidence


def test_advice_ignores_losses_that_were_inherited() -> None:
    heirs = [replace(each, inherits=each.trial - 1) for each in flat()[1:]]
    for kind in ("confirm", "flat"):
        assert told(result(flat()), kind)
        assert told(result([flat()[0], *heirs]), kind) is None, "whatever the options of the last session"
    still = with_curves(falling)
    assert told(result(still), "epochs")
    assert told(result([*still[:-1], replace(still[-1], inherits=0)]), "epochs") is None
    near = crowded(64, far, lr=1.0)
    assert told(result(near), "bounds")
    assert told(result([replace(each, inherits=0) if each.trial else each for each in near]), "bounds") is None


def test_where_the_winner_is_clear_or_the_search_goes_on_nobody_asks_for_seeds() -> None:
    close = [one(0, 0.500), one(1, 0.504)]
    assert told(result([one(0, 0.5), one(1, 0.52)]), "confirm") is None
    assert told(result(close, {"budget": 3}), "confirm") is None
    assert told(result(close, {"budget": 3}, last_summary={"exhausted": True}), "confirm") is not None
    assert told(result(close, is_running=True, last_summary={}), "confirm") is None
    assert told(result(close, {"confirm_seeds": 2}), "confirm") is None, "it is to come"
    assert told(result([one(0, 0.5), one(1, math.inf), one(2, math.nan)]), "confirm") is None


def confirmed(*groups: Sequence[float]) -> RunResult:
    """Make the result of a run whose best were confirmed, with these losses."""
    evaluations = [one(trial, 0.1 * trial) for trial in range(len(groups))]
    confirmations = [
        one(place, loss, confirms=trial, seed=place)
        for trial, group in enumerate(groups)
        for place, loss in enumerate(group)
    ]
    return result(evaluations, {"confirm_seeds": len(groups[0])}, confirmations=confirmations)


def spaced(mean: float, deviation: float, count: int) -> list[float]:
    """Return evenly spaced losses with this mean and this standard deviation."""
    steps = [place - (count - 1) / 2 for place in range(count)]
    return [mean + deviation * step / statistics.stdev(steps) for step in steps]


def test_advice_if_bounds_are_wide_asks_for_more_seeds() -> None:
    advice = told(confirmed(spaced(0.110, 0.010, 3), spaced(0.112, 0.010, 3), spaced(0.9, 0.01, 3)), "confirm")
    assert advice is not None
    assert advice.text == "Confirm with 7 seeds, or take trial 0, which is worse than the best by 0.01798 at most."
    assert advice.evidence == (
        "With 3 other seeds each, trials 0 and 1 may be the best, and none is certain to be as good within 0.01, one "
        "standard deviation by seeds."
    )
    assert advice.command == "run_islands.py my.py --run-dir runs/x --resume --confirm-seeds 7"
    enough = [spaced(mean, 0.010, 7) for mean in (0.110, 0.112, 0.9)]
    assert told(confirmed(*enough), "confirm") is None, "as many seeds settle it"


def test_advice_names_the_cheapest_only_of_trials_within_bounds() -> None:
    groups = [spaced(mean, 0.13, 30) for mean in (0.683, 0.69, 0.75, 1.0, 1.719)]
    advice = told(confirmed(*groups), "confirm")
    assert advice is not None
    assert advice.text == "Take the cheapest of trials 0 and 1."
    assert "as good as the best within 0.13, one standard deviation by seeds" in advice.evidence
    assert advice.command == ""


def test_advice_if_bounds_stay_wide_takes_the_first_trial() -> None:
    advice = told(confirmed([0.0, 0.0, 0.0], [-0.1, 0.0, 0.1]), "confirm")
    assert advice is not None
    assert advice.text.startswith("Take trial 0, which is worse than the best by 0.")
    assert "That would need more than 30 seeds." in advice.evidence
    assert advice.command == ""


def test_one_seed_asks_for_three_and_a_clear_winner_for_none() -> None:
    few = told(confirmed([0.1], [0.2]), "confirm")
    assert few is not None
    assert few.command.endswith("--resume --confirm-seeds 3")
    assert told(confirmed([0.10, 0.12, 0.11], [0.5, 0.51, 0.52]), "confirm") is None
    assert told(confirmed([0.10, 0.12, 0.11]), "confirm") is None
    half = confirmed([0.10, 0.12, 0.11], [0.11, 0.13, 0.125])
    waiting = replace(half, confirmations=[*half.confirmations, one(9, 0.1, "waiting", confirms=1)])
    assert told(waiting, "confirm") is None


def test_advice_compares_huge_and_tiny_losses() -> None:
    tiny, huge = ([5e-324, 0.0], [0.0, 0.0]), ([1e300] * 3, [1e300, 9e299, 1e300])
    for groups in (([1e308, -1e308], [1e308, -1e307]), tiny, huge):
        advice = told(confirmed(*groups), "confirm")
        assert advice is not None
        assert "trials 0 and 1 may be" in advice.evidence.replace("trials 1 and 0", "trials 0 and 1")


def broken(worker: int, others: str = "complete") -> list[Evaluation]:
    """Make a run on four workers, of which one always fails."""
    return [one(trial, 1.0 + trial, "failed" if trial % 4 == worker else others) for trial in range(24)]


def test_a_worker_that_always_fails_is_named() -> None:
    advice = told(result(broken(2)), "worker")
    assert advice is not None
    assert advice.text == "Look at worker 2: the host may be broken."
    assert advice.evidence == "All 6 evaluations of worker 2 (ranks 4 to 5) failed, and 0 of the 18 others."
    assert advice.command == "hpo show runs/x 22"
    assert find_advice(result(broken(2), is_running=True, last_summary={}))[0] == advice, "at once"
    two = [replace(evaluation, state="failed") if evaluation.worker == 3 else evaluation for evaluation in broken(2)]
    several = told(result(two), "worker")
    assert several is not None
    assert several.evidence == "All 12 evaluations of workers 2 and 3 failed, and 0 of the 12 others."


def test_a_worker_that_fails_as_others_do_is_not_named() -> None:
    assert told(result(broken(2, "failed")), "worker") is None, "the objective is broken"
    assert told(result(broken(2)[:10]), "worker") is None, "two of two"
    lucky = [one(trial, 1.0, worker=1) for trial in range(3)]
    unlucky = [one(trial, 1.0, "failed", worker=0) for trial in range(3, 6)]
    assert told(result([*lucky, *unlucky]), "worker") is None, "so few tell nothing"
    assert told(result([*[one(trial, 1.0, worker=1) for trial in range(200)], *unlucky[:2]]), "worker") is None
    assert told(result([*[one(trial, 1.0, worker=1) for trial in range(200)], *unlucky]), "worker") is not None
    assert told(result([one(trial, 1.0, "failed", worker=0) for trial in range(9)]), "worker") is None
    chance = random.Random(0)
    alarms = 0
    for _ in range(300):
        states = ["failed" if chance.random() < 0.3 else "complete" for _ in range(40)]
        run = [one(trial, 1.0, state, worker=chance.randrange(4)) for trial, state in enumerate(states)]
        alarms += told(result(run), "worker") is not None
    assert alarms <= 6


def test_workers_of_earlier_sessions_are_others() -> None:
    assert told(result(broken(2), session_start=35.0), "worker") is None
    assert told(result(broken(2), session_start=5.0), "worker") is not None


def busy(fraction: object, seconds: float = 100.0) -> dict[str, Any]:
    """Return the times of a session."""
    return {"worker_busy_fraction": fraction, "wall_seconds": seconds}


def test_workers_that_wait_at_the_end_are_too_many() -> None:
    evaluations = [one(trial, 1.0) for trial in range(5)]
    evaluations[4] = replace(evaluations[4], ended=200.0)
    saving = told(
        result([*evaluations[:4], replace(evaluations[4], checkpoint_step=3)], last_summary=busy(0.29)), "idle"
    )
    assert saving is not None
    assert saving.text == "Let idle workers join other workers at the end."
    assert saving.command.endswith(" --elastic")
    advice = told(result(evaluations, last_summary=busy(0.29)), "idle")
    assert advice is not None
    assert advice.text == "Use fewer workers of more ranks each, or more evaluations."
    assert advice.evidence.startswith(
        "Workers were busy 29% of the time. They were mostly idle at the end, while other"
    )
    assert advice.command == "run_islands.py my.py --set epochs=10 --set 'data=my data' --ranks-per-worker 4"
    odd = told(
        result(evaluations, {"layout": {"ranks": 9, "ranks_per_worker": 3, "islands": 1}}, last_summary=busy(0.29)),
        "idle",
    )
    assert odd is not None
    assert odd.command == ""


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "evaluations are too short for this many workers"), (3.0, "what workers wait for")]
)
def test_workers_that_wait_in_between_have_a_reason(seconds: float, text: str) -> None:
    evaluations = [replace(evaluation, ended=evaluation.started + seconds) for evaluation in flat(80)]
    advice = told(result(evaluations, last_summary=busy(seconds / 10)), "idle")
    assert advice is not None
    assert text in advice.text
    assert f"an evaluation takes {seconds} s, and then its worker waits for" in advice.evidence


def test_workers_that_are_busy_or_have_hardly_begun_are_left_alone() -> None:
    evaluations = flat(80)
    for ended in (busy(0.5), busy(0.1, 59.0), busy(None), busy("0.1"), busy(math.nan), busy(True), busy(-1), {}):
        assert told(result(evaluations, last_summary=ended), "idle") is None, ended
    assert told(result(evaluations[:4], last_summary=busy(0.1)), "idle") is None
    assert (
        told(
            result(evaluations, {"layout": {"ranks": 2, "ranks_per_worker": 2, "islands": 1}}, last_summary=busy(0.1)),
            "idle",
        )
        is None
    )


LOSSES: dict[str, list[float]] = {
    "none": [],
    "one": [1.0],
    "zero": [0.0] * 40,
    "huge": [1e300 * (-1) ** place for place in range(40)],
    "as large as can be": [1.7e308, -1.7e308] * 20,
    "tiny": [5e-324 * place for place in range(40)],
    "no numbers": [math.nan, math.inf, -math.inf] * 15,
    "negative": [-1.0 - place / 100 for place in range(40)],
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("epochs", [0, 1, 4, 9])
def test_any_losses_are_borne(name: str, epochs: int) -> None:
    states = ("complete", "complete", "pruned", "failed", "running", "waiting", "interrupted")
    for kinds in (states[:1], states):
        evaluations = []
        for trial, loss in enumerate(LOSSES[name]):
            curve = {epoch: loss * (epochs - epoch) for epoch in range(1, epochs + 1)}
            origin = "runs/before" if trial % 5 == 4 else ""
            evaluations.append(one(trial, loss, kinds[trial % len(kinds)], curve=curve, imported_from=origin))
        for advice in find_advice(result(evaluations)):
            assert advice.text.endswith(".")
            assert "nan" not in advice.evidence


def test_anybodys_run_json_and_summary_are_borne() -> None:
    evaluations = [*flat(), *(replace(evaluation, trial=evaluation.trial + 64) for evaluation in with_curves(falling))]
    huge = [*VALUES, "'", "run_islands.py '", "x.py " * 999, {"ranks": 10**30, "ranks_per_worker": 1}, [1] * 3]
    for value in huge:
        for name in ("command", "search_space"):
            if isinstance(value, str):
                assert len(find_advice(result(evaluations, {name: value}))) == 2
        for name in ("worker_busy_fraction", "wall_seconds", "exhausted", "stopped"):
            assert find_advice(result(evaluations, last_summary={**busy(0.1), name: value}))
        find_advice(result(evaluations, {"settings": {"epochs": value, "\x1b": value}}))
        text = value if isinstance(value, str) else json.dumps(value)
        more_epochs = told(result(with_curves(falling), {"set": {"a": text}}), "epochs")
        assert more_epochs is not None
        assert (more_epochs.command == "") == (len(text) > 900)


def test_command_to_go_on_with_a_program_keeps_its_options() -> None:
    options = ["--space=lr=Float(1e-4, 1e-1)", "--loss=val_loss=(\\S+)", "--first-report=2"]
    pairs = ["--space", "act=Categorical('a', 'b')", "--flag", "amp", "--resume-args", "--resume {folder}/last.pt"]
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
    known = result([one(0, 1.0)], {"command": shlex.join(words), "search_space": "train.py"})
    assert sorted(shlex.split(known.format_resume_command("--confirm-seeds", "3"))) == sorted(
        ["hpo", "search", *pairs, *options, "--run-dir", "runs/x", "--resume", "--confirm-seeds", "3", *program]
    )
    assert shlex.split(known.format_resume_command())[-len(program) :] == program
    assert shlex.split(known.format_confirm_command(3))[-len(program) - 2 :] == [*program, "--seed", "{seed}"]
    seeded = result([one(0, 1.0)], {"command": shlex.join([*words, "--s={seed}"]), "search_space": "train.py"})
    assert seeded.format_confirm_command(3) == seeded.format_resume_command("--confirm-seeds", "3")
    bare = shlex.join(["run_islands.py", *options[:1], *program])
    known = result([one(0, 1.0)], {"command": bare, "search_space": "train.py"})
    assert shlex.split(known.format_resume_command()) == [
        "run_islands.py",
        *options[:1],
        "--run-dir",
        "runs/x",
        "--resume",
        *program,
    ]


def test_commands_are_those_that_the_shell_takes_apart_again() -> None:
    close = [one(0, 0.500), one(1, 0.504)]
    known = result(close, {"command": "'my runs/go.py' 'a b.py'", "search_space": "a b.py"})
    advice = told(replace(known, run_dir=Path("a'b; c")), "confirm")
    assert advice is not None
    words = ["my runs/go.py", "a b.py", "--run-dir", "a'b; c", "--resume", "--confirm-seeds", "3"]
    assert shlex.split(advice.command) == words
    for about in ({"command": "rm -rf /"}, {"command": ""}):
        bare = told(result(close, about), "confirm")
        assert bare is not None
        assert bare.command == "--run-dir runs/x --resume --confirm-seeds 3"
    installed = told(result(close, {"command": "hpo search 'a b.py' --seed 3", "search_space": "a b.py"}), "confirm")
    assert installed is not None
    assert installed.command == "hpo search 'a b.py' --run-dir runs/x --resume --confirm-seeds 3"
    default = told(
        result(close, {"command": "run_islands.py", "search_space": "search_spaces/digits_cnn.py"}), "confirm"
    )
    assert default is not None
    assert default.command.startswith("run_islands.py --run-dir")


def test_shares_and_lists_are_written_as_people_do() -> None:
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
def advised(tmp_path: Path) -> Path:
    """Make a run on disk from which something follows."""
    record = make_run(
        tmp_path / "run", budget=5, command="run_islands.py --set '<b>=\x1b[31m'", set={"<b>": "\x1b[31m"}
    )
    for trial in range(5):
        curve = {epoch: (1 + trial / 1000) * falling(epoch) for epoch in range(1, 5)}
        add_evaluation(record, curve=curve, began=START_SECONDS + trial)
    return tmp_path / "run"


def test_the_tables_and_the_page_say_what_follows(advised: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call_hpo("top", advised) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    tables, advice = out.split("\nWhat to do next\n")
    assert "5 complete, of 5" in tables
    assert advice.count("- ") == 2
    assert f"      run_islands.py --run-dir {advised} --resume --confirm-seeds 3\n" in advice
    assert "      run_islands.py --set '<b>=\\x1b[31m' --set epochs=8\n" in advice
    assert max(map(len, (line for line in advice.splitlines() if not line.startswith("      ")))) <= 100
    page = render_report(RunReader(advised), 10, START_SECONDS)
    section = page.split("<h3>What to do next</h3>")[1].split("</section>")[0]
    assert section.count("<li>") == section.count("<pre") == 2
    assert "<strong>Train the best again with other seeds before you rely on the winner.</strong>" in section
    assert "&lt;b&gt;" in section
    assert "<b>" not in page
    assert "<code>--confirm-seeds 3</code>" not in page, "it is said once"


def test_a_run_ends_with_it_before_the_path_of_the_report(advised: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finalize_run(advised, None, load_problem(QUICK), None)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["", "What to do next"]
    assert lines[-2:] == ["", f"The report is {advised}/report.html"]


def test_where_nothing_follows_nothing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = make_run(tmp_path / "run")
    for loss in (0.5, 0.7, 0.9):
        add_evaluation(record, curve={1: loss + 1, 2: loss})
    add_evaluation(record, TrialState.FAIL, failure="no")
    assert call_hpo("top", tmp_path / "run") == 0
    finalize_run(tmp_path / "run", None, load_problem(QUICK), None)
    print_advice([])
    assert capsys.readouterr().out.endswith(f", of 64\nThe report is {tmp_path}/run/report.html\n")
    page = (tmp_path / "run" / "report.html").read_text("utf-8")
    assert "What to do next" not in page
    assert 'class="advice"' not in page
    assert "<code>--confirm-seeds 3</code>" in page


def test_a_run_that_goes_on_is_told_by_what_it_has_not_written(advised: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunReader(advised)
    assert [advice.kind for advice in run.find_advice()] == ["confirm", "epochs"]
    monkeypatch.setattr(type(run.run_dir), "is_in_use", True)
    assert [advice.kind for advice in run.find_advice()] == ["epochs"]
    run.run_dir.summary_json.write_text("{}")
    assert [advice.kind for advice in run.find_advice()] == ["epochs"], "somebody has edited it"
    run.run_dir.summary_json.write_text('{"stopped": null}')
    assert [advice.kind for advice in run.find_advice()] == ["confirm", "epochs"], "the session has ended"
