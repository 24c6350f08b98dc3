"""Test which confirmed individuals may be the best, and which are equally good."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence

import pytest
from scipy.stats import t

from hpo.results.confirmation import (
    ConfirmedIndividual,
    compare_confirmed,
    compute_margin,
    count_seeds_needed,
)
from hpo.results.summary import Summary
from hpo.store.evaluations import Evaluation
from hpo.views.result_text import describe_comparison, describe_confirmed
from tests.support.evaluations import make_evaluation
from tests.support.runs import make_manifest


def make_confirmation(trial: int, seed: int, loss: float, state: str = "complete") -> Evaluation:
    return make_evaluation(0, state, loss=loss, confirms=trial, seed=seed)


def make_confirmations(groups: Sequence[Sequence[float]]) -> list[Evaluation]:
    """Return confirmations of trials 0, 1, ...

    The losses of each trial, one per seed, are a sequence in `groups`.
    """
    return [
        make_confirmation(trial, seed, loss)
        for trial, group in enumerate(groups)
        for seed, loss in enumerate(group)
    ]


def describe(groups: Sequence[Sequence[float]]) -> list[str]:
    entries = compare_confirmed(make_confirmations(groups))
    names = [f"trial {entry.trial}" for entry in entries]
    return describe_comparison(entries, compute_margin(entries), names)


def test_compare_ranks_by_failures_and_mean() -> None:
    losses = {4: [1.0, 1.1, 1.3], 2: [1.2, 0.9, 1.4], 9: [2.0, 2.5, 2.2], 7: [0.1, 0.2]}
    entries = compare_confirmed(
        [
            *(
                make_confirmation(trial, seed, loss)
                for trial, group in losses.items()
                for seed, loss in enumerate(group)
            ),
            make_confirmation(7, 2, math.inf, "failed"),
            make_confirmation(9, 3, math.inf, "running"),
        ]
    )
    assert [entry.trial for entry in entries] == [4, 2, 9, 7], (
        "a failed seed must count against trial 7"
    )
    assert [entry.failed for entry in entries] == [0, 0, 0, 1]
    assert entries[0].deviation == pytest.approx(0.1528, abs=1e-4)
    assert [entry.may_be_best for entry in entries] == [True, True, False, None]
    variances = {trial: statistics.variance(losses[trial]) for trial in (4, 2, 9)}
    pooled = statistics.mean(variances.values())
    larger = {trial: max(variance, pooled) for trial, variance in variances.items()}
    quantile = t.ppf(1 - 0.05 / 2, 6)
    width = {trial: quantile * math.sqrt((larger[trial] + larger[4]) / 3) for trial in (2, 9)}
    above = {trial: statistics.mean(losses[trial]) - statistics.mean(losses[4]) for trial in (2, 9)}
    bounds = [entry.worse_by_at_most for entry in entries]
    assert bounds[:2] == pytest.approx([width[2] - above[2], width[2] + above[2]]), (
        "both bounds follow from the first two trials"
    )
    width_of_both = quantile * math.sqrt((larger[9] + larger[2]) / 3)
    between = statistics.mean(losses[9]) - statistics.mean(losses[2])
    assert bounds[2] == pytest.approx(max(width[9] + above[9], width_of_both + between))
    assert bounds[3] is None
    assert compute_margin(entries) == pytest.approx(math.sqrt(min(variances[4], pooled)))


def test_compare_ranks_individuals_with_fewer_seeds_last() -> None:
    entries = compare_confirmed(make_confirmations([[0.52, 0.5, 0.53], [0.55, 0.53, 0.52], [0.47]]))
    assert [entry.trial for entry in entries] == [0, 1, 2], "a single loss may be low by luck"
    assert [entry.may_be_best for entry in entries] == [True, True, None]


def test_compare_without_randomness_or_with_single_losses(recwarn: pytest.WarningsRecorder) -> None:
    entries = compare_confirmed(make_confirmations([[0.3, 0.1 + 0.2], [0.3, 0.3], [0.4, 0.4]]))
    assert [entry.may_be_best for entry in entries] == [True, True, False]
    assert [entry.as_good for entry in entries] == [True, True, False]
    assert entries[2].worse_by_at_most == pytest.approx(0.1)
    for few in ([[1.0], [2.0]], [[1.0, 2.0], [2.0]], [[1.0, 2.0]]):
        entries = compare_confirmed(make_confirmations(few))
        assert {entry.worse_by_at_most for entry in entries} == {None}
        assert not any(entry.as_good for entry in entries)
        assert compute_margin(entries) is None
    assert compare_confirmed([]) == []
    huge = compare_confirmed(make_confirmations([[1e300, 2e300], [2e300, 4e300]]))
    usual = compare_confirmed(make_confirmations([[1.0, 2.0], [2.0, 4.0]]))
    assert usual[1].worse_by_at_most is not None
    assert huge[1].worse_by_at_most == pytest.approx(1e300 * usual[1].worse_by_at_most)
    assert not recwarn.list


def test_describe_confirmed_names_best_and_equally_good() -> None:
    assert describe([[0.1, 0.2]]) == [
        "There is nothing to compare it with: --top-n 3 would confirm three."
    ]
    assert describe([[0.1], [0.2]]) == [
        "There are too few losses: nothing is compared with the best."
    ]
    assert describe([[0.1, 0.11], [0.9, 0.91]]) == [
        "Trial 0 is the best of these (95% confidence, Hsu's multiple comparisons with the best)."
    ]
    wide = describe([[0.1, 0.12, 0.14], [0.11, 0.13, 0.15], [0.9, 0.91, 0.92]])
    assert wide[0].startswith(
        "Trial 0 and trial 1 may be the best, and no other one (95% confidence"
    )
    assert wide[1].startswith("None is certain to be as good as the best within 0.0")
    assert "trial 0 may be worse by up to 0.0" in wide[1]
    # Trial 2, with a mean that may be lower, has failed once, and is not compared.
    confirmations = make_confirmations([[0.1, 0.12, 0.14], [0.11, 0.13, 0.15], [0.01, 0.02]])
    confirmations.append(make_confirmation(2, 2, math.inf, "failed"))
    one_failed = describe_confirmed(Summary([], make_manifest(), 3, confirmations))
    assert one_failed[0].startswith(
        "Trial 0 and trial 1 may be the best of those that failed as often (95% confidence"
    )
    equal = [0.1, 0.12, 0.14] * 10
    assert describe([equal, equal])[1].startswith(
        "Trial 0 and trial 1 are as good as the best within 0.01"
    )


@pytest.mark.parametrize("searched", [0.5, 0.7])
def test_losses_depend_on_the_seed_if_that_of_the_search_differs(searched: float) -> None:
    confirmations = make_confirmations([[0.5, 0.5], [0.6, 0.6]])
    evaluations = [make_evaluation(0, loss=searched), make_evaluation(1, loss=0.6)]
    summary = Summary(evaluations, make_manifest(), 2, confirmations)
    told = " ".join(describe_confirmed(summary))
    assert ("do not depend on the seed" in told) == (searched == 0.5)
    assert "accounts for" not in told


def test_count_seeds_needed_suffices_for_the_first() -> None:
    def spread(mean: float, count: int) -> list[float]:
        steps = [index - (count - 1) / 2 for index in range(count)]
        return [mean + step / statistics.stdev(steps) for step in steps]

    needed = count_seeds_needed(
        compare_confirmed(make_confirmations([spread(1.0, 3), spread(1.2, 3)])), 30
    )
    assert needed is not None
    assert not compare_confirmed(
        make_confirmations([spread(1.0, needed - 1), spread(1.2, needed - 1)])
    )[0].as_good
    assert compare_confirmed(make_confirmations([spread(1.0, needed), spread(1.2, needed)]))[
        0
    ].as_good
    assert (
        count_seeds_needed(
            compare_confirmed(make_confirmations([spread(1.0, 3), spread(1.2, 3)])), needed - 1
        )
        is None
    )


ALIKE = [1.0] * 10
CASES = [
    # (means, deviations, seeds, share of runs in which trial 0 is as good, at least)
    ([0.0] * 9 + [5.0], ALIKE, 3, 0.0),
    ([0.0] * 9 + [5.0], ALIKE, 30, 0.4),
    ([0.0, 0.0, 5.0], [1.0] * 3, 20, 0.7),
    ([0.0] * 9 + [15.0], [1.0] * 9 + [3.0], 3, 0.0),
    ([0.5 * trial for trial in range(9)] + [9.0], [0.5] * 5 + [2.0] * 5, 5, 0.0),
]


@pytest.mark.slow
@pytest.mark.parametrize(("means", "deviations", "seeds", "kept"), CASES)
def test_compare_holds_in_simulated_runs(
    means: list[float], deviations: list[float], seeds: int, kept: float
) -> None:
    """The bounds on the differences hold in 95% of the runs.

    A trial that is five deviations worse is never as good as the best. A trial with an equal mean
    may be the best.
    """
    runs, rng = 150, random.Random(0)
    drawn = [
        compare_confirmed(
            make_confirmations(
                [
                    [rng.gauss(m, s) for _ in range(seeds)]
                    for m, s in zip(means, deviations, strict=True)
                ]
            )
        )
        for _ in range(runs)
    ]

    def share(holds: Callable[[dict[int, ConfirmedIndividual]], bool]) -> float:
        return sum(holds({entry.trial: entry for entry in entries}) for entries in drawn) / runs

    best, worst = min(means), len(means) - 1
    excess = [mean - best for mean in means]

    def get_bound(individual: ConfirmedIndividual) -> float:
        assert individual.worse_by_at_most is not None
        return individual.worse_by_at_most

    covered = share(lambda run: all(get_bound(run[trial]) >= excess[trial] for trial in run))
    assert covered >= 0.95 - 2 * math.sqrt(0.95 * 0.05 / runs)
    assert share(lambda run: bool(run[0].may_be_best)) >= 0.95
    assert share(lambda run: bool(run[0].as_good)) >= kept
    assert share(lambda run: bool(run[worst].as_good)) == 0.0
