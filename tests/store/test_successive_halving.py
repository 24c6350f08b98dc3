"""Test successive halving: which evaluations continue, pause and are promoted at a rung.

A promoted evaluation continues after its pause.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from optuna.trial import TrialState

from hpo.errors import DuplicateError
from hpo.objectives import ONLY_LOSS, Objectives
from hpo.results.summary import NextPromotion, RungSummary, Summary, summarize_rungs
from hpo.store.evaluations import Assignment, Evaluation, group_by_individual
from hpo.store.pruning import (
    HALVING_SCHEDULES,
    HalvingSchedule,
    PausingPruner,
    Rung,
    SuccessiveHalving,
    compute_rungs,
    describe_blind_spot,
    find_promotable,
    is_search_over,
)
from hpo.store.ranking import make_ranking
from hpo.store.record import Record
from hpo.store.study_writer import Claims
from tests.support.runs import SPACE, make_manifest, make_run
from tests.support.writer_stubs import make_client, make_writer

ASHA = HALVING_SCHEDULES["asha"]
TWO = Objectives(("loss", "parameters"))
LOSS_AND_PARAMETERS = {"names": ["loss", "parameters"], "maximized": []}  # in run.json


def make_evaluation(trial: int, state: str, *losses: float, **fields: Any) -> Evaluation:
    curve = dict(enumerate(losses, start=1))
    if state == "paused":
        fields["paused_after"] = len(losses)
    return Evaluation(trial, state, min(losses, default=9.0), {}, 0, 0, 0, curve=curve, **fields)


@pytest.mark.parametrize(
    ("epochs", "is_rung"), [(1, True), (2, False), (3, True), (6, False), (9, True), (27, True)]
)
def test_schedule_rungs_are_powers_of_three(epochs: int, is_rung: bool) -> None:
    assert ASHA.has_rung(0, epochs) is is_rung


def test_one_epoch_schedule_has_one_rung() -> None:
    halving = HALVING_SCHEDULES["one-epoch"]
    assert [epochs for epochs in range(1, 30) if halving.has_rung(5, epochs)] == [1]
    assert [halving.count_promoted(reached) for reached in (1, 10, 1000)] == [3, 3, 3]


def test_brackets_get_similar_numbers_of_epochs() -> None:
    halving = HALVING_SCHEDULES["hyperband"]
    assert Counter(map(halving.find_bracket, range(130))) == {0: 90, 1: 30, 2: 10}
    assert len(set(map(halving.find_bracket, range(8)))) == 3, "short runs must use all brackets"
    first = {bracket: root for root in range(13, 0, -1) for bracket in [halving.find_bracket(root)]}
    found = {
        b: [epochs for epochs in range(1, 100) if halving.has_rung(root, epochs)]
        for b, root in first.items()
    }
    assert found == {0: [1, 3, 9, 27, 81], 1: [3, 9, 27, 81], 2: [9, 27, 81]}


def test_rung_lets_a_third_and_at_least_one_continue() -> None:
    assert [ASHA.count_promoted(reached) for reached in (1, 2, 3, 5, 6, 8, 9)] == [
        1,
        1,
        1,
        1,
        2,
        2,
        3,
    ]
    assert [ASHA.count_needed(index) for index in (0, 1, 2)] == [1, 6, 9]
    assert all(
        ASHA.count_promoted(ASHA.count_needed(index) or 0)
        > index
        >= ASHA.count_promoted((ASHA.count_needed(index) or 1) - 1)
        for index in (1, 7)
    )


def test_find_promotable_returns_highest_rung_first() -> None:
    evaluations = [
        make_evaluation(0, "complete", 0.5, 0.4, 0.3, *[0.2] * 6),
        make_evaluation(1, "paused", 0.6, 0.5, 0.4),
        make_evaluation(2, "paused", 0.7, 0.6, 0.5),
        *(make_evaluation(trial, "paused", 0.8 + trial) for trial in range(3, 8)),
    ]
    # 8 have reached the first rung, of which 2 continue. Both have continued.
    assert find_promotable(ASHA, evaluations) == []
    evaluations.append(make_evaluation(8, "running", 9.0))
    assert find_promotable(ASHA, evaluations) == [], (
        "trial 2 has used the third promotion before better ones came"
    )
    evaluations += [make_evaluation(trial, "running", 0.1, 0.1, 0.1) for trial in (9, 10, 11)]
    evaluations += [make_evaluation(trial, "failed", 0.05, 0.05, 0.05) for trial in (12,)]
    last = make_evaluation(13, "paused", 0.11)
    assert [e.trial for e in find_promotable(ASHA, [*evaluations, last])] == [13]
    good = make_evaluation(14, "paused", 0.2, 0.15, 0.09)
    assert [e.trial for e in find_promotable(ASHA, [*evaluations, last, good])] == [14, 13]


def test_rung_near_the_end_is_not_effective() -> None:
    evaluations = [
        make_evaluation(0, "complete", *[0.5] * 10),
        make_evaluation(1, "running", *[0.6] * 9),
    ]
    assert [rung.epochs for rung in compute_rungs(ASHA, evaluations)] == [1, 3]
    longer = [make_evaluation(0, "complete", *[0.5] * 27), evaluations[1]]
    assert [rung.epochs for rung in compute_rungs(ASHA, longer)] == [1, 3, 9]
    assert [rung.epochs for rung in compute_rungs(ASHA, evaluations[1:])] == [1, 3, 9], (
        "the last step is unknown yet"
    )
    cut = [make_evaluation(0, "complete", *[0.5] * 10, cut_after=10), evaluations[1]]
    assert [rung.epochs for rung in compute_rungs(ASHA, cut)] == [1, 3, 9], (
        "a cut evaluation says nothing about the last step"
    )


def test_paused_evaluation_near_the_end_is_promoted() -> None:
    first, second, third = (
        make_evaluation(0, "running", *[0.5] * 9),
        make_evaluation(1, "paused", *[0.6] * 9),
        make_evaluation(2, "paused", 0.8, 0.7, 0.7),
    )
    assert find_promotable(ASHA, [first, second, third]) == [], "the last step may be 27"
    first = make_evaluation(0, "complete", *[0.5] * 9)
    assert find_promotable(ASHA, [first, second, third]) == [second]
    assert not is_search_over([first, second, third], 3, "asha")
    promoted = [
        make_evaluation(1, "promoted", *[0.6] * 9, paused_after=9),
        make_evaluation(3, "running", *[0.6] * 9, retry_of=1),
    ]
    assert find_promotable(ASHA, [first, *promoted, third]) == []


def test_ineffective_rung_promotes_its_paused_evaluations(tmp_path: Path) -> None:
    """Evaluations end after ten epochs, so a rung at 9 saves nothing.

    This is known once one evaluation is complete. Two evaluations were paused at 9 before. A fourth
    one reaches 9 later.
    """
    early = [make_evaluation(2, "paused", *[0.6] * 9), make_evaluation(3, "paused", *[0.7] * 9)]
    evaluations = [
        make_evaluation(0, "complete", *[0.5] * 10),
        *early,
        make_evaluation(4, "running", *[0.9] * 9),
    ]
    (last,) = [rung for rung in compute_rungs(ASHA, evaluations) if not rung.is_effective]
    assert (last.epochs, last.losses) == (9, [(0.6, 2), (0.7, 3)])
    assert find_promotable(ASHA, evaluations) == early
    late = make_evaluation(5, "paused", *[0.8] * 27)
    assert find_promotable(ASHA, [*evaluations, late]) == [late, *early], (
        "rungs in between must not matter"
    )

    run = HalvingRun(tmp_path, budget=9)
    started = [
        assignment for assignment in (run.claim() for _ in range(3)) if assignment is not None
    ]
    for assignment, epochs in zip(started, (10, 9, 9), strict=True):
        for epoch in range(1, epochs + 1):
            run.record.report(assignment, epoch, 0.5)
    run.record.prune(started[1], 0.5, 1.0, {}, paused_after=9)
    run.record.complete(started[0], 0.5, 1.0, {})
    assert run.pausing.decide_pruning(run.record, started[2], 9).state == "running"


def test_individual_with_several_trials_counts_once() -> None:
    evaluations = [
        make_evaluation(0, "promoted", 0.5, paused_after=1),
        make_evaluation(1, "interrupted", 0.5, 0.4, retry_of=0),
        make_evaluation(2, "running", retry_of=1),  # It starts again and will reach the same rungs.
        make_evaluation(3, "paused", 0.6),
    ]
    (rung,) = compute_rungs(ASHA, evaluations)
    assert (rung.losses, rung.continued, list(rung.paused)) == ([(0.5, 0), (0.6, 3)], {0}, [3])


def test_failed_evaluation_is_not_promoted() -> None:
    evaluations = [make_evaluation(trial, "paused", 0.5 + trial) for trial in range(5)]
    assert [e.trial for e in find_promotable(ASHA, evaluations)] == [0]
    evaluations[0] = make_evaluation(0, "failed", 0.5)
    assert [e.trial for e in find_promotable(ASHA, evaluations)] == [1]


def compute_expected_rungs(
    halving: HalvingSchedule, evaluations: Sequence[Evaluation]
) -> list[Rung]:
    """Return the rungs of a search, computed from all of its evaluations at once."""
    ends = [
        max(evaluation.curve, default=0)
        for evaluation in evaluations
        if evaluation.state == "complete"
    ]
    highest = max(ends, default=math.inf) / (2 if halving.promotion_limit else halving.factor)
    found: dict[tuple[int, int], Rung] = {}
    for root, group in group_by_individual(
        [evaluation for evaluation in evaluations if not evaluation.imported_from]
    ).items():
        curve = max((evaluation.curve for evaluation in group), key=len)
        bracket, latest, most = halving.find_bracket(root), group[-1], max(curve, default=0)
        for epochs in range(1, most + 1):
            if not halving.has_rung(root, epochs) or not (
                epochs <= highest or latest.paused_after == epochs
            ):
                continue
            rung = found.setdefault(
                (bracket, epochs),
                Rung(bracket, epochs, epochs <= highest, make_ranking(1), 0, set(), {}),
            )
            loss = min(loss for epoch, loss in curve.items() if epoch <= epochs)
            rung.ranking.add(root, (math.inf if latest.state == "failed" else loss,))
            if most > epochs:
                rung.continued.add(root)
            if latest.state == "paused" and latest.paused_after == epochs:
                cast("dict[int, Evaluation]", rung.paused)[root] = latest
    complete = [rung for _, rung in sorted(found.items())]
    return [
        replace(
            r,
            promoted_count=halving.count_promoted(len(r.losses))
            if r.is_effective
            else len(r.losses),
        )
        for r in complete
    ]


@pytest.mark.parametrize("name", HALVING_SCHEDULES)
def test_halving_updated_step_by_step_equals_new_one(tmp_path: Path, name: str) -> None:
    """Simulate five workers. Their evaluations pause, are promoted, fail and are interrupted."""
    halving, random_source = HALVING_SCHEDULES[name], random.Random(7)
    record = make_run(tmp_path / "run")
    claims = Claims(record, SPACE.make_distributions(), 60, halving=halving)
    pausing, tracker = PausingPruner(halving, 60), SuccessiveHalving(halving)
    running: list[tuple[Assignment, int, list[float]]] = []
    states: Counter[str] = Counter()
    for number in range(500):
        if len(running) < 5:
            params = {"layers": 1, "activation": "relu", "lr": (number + 1) / 1000, "gamma": 0.9}
            claimed = claims.claim(params, island=0, worker=0, generation=number, propagator="ga")
            if claimed is not None:
                running.append((claimed, 0, []))
        if not running:
            break
        assignment, epochs, losses = running.pop(random_source.randrange(len(running)))
        losses.append(random_source.random())
        record.report(assignment, epochs + 1, losses[-1])
        end, state = (
            random_source.random(),
            pausing.decide_pruning(record, assignment, epochs + 1).state,
        )
        if end < 0.03:
            record.fail(assignment, "bad luck", "", 1.0)
        elif end < 0.06:
            record.interrupt(assignment)
        elif epochs + 1 == 27:
            record.complete(assignment, min(losses), 1.0, {})
        elif state == "paused":
            record.prune(assignment, min(losses), 1.0, {}, paused_after=epochs + 1)
        else:
            running.append((assignment, epochs + 1, losses))
        evaluations = record.read_evaluations()
        expected_rungs = compute_expected_rungs(halving, evaluations)
        learned = tracker.update(evaluations).list_rungs()
        assert (learned, [rung.losses for rung in learned]) == (
            expected_rungs,
            [rung.losses for rung in expected_rungs],
        )
        assert tracker.find_promotable() == find_promotable(halving, evaluations)
        states.update(evaluation.state for evaluation in evaluations)
    assert {"complete", "failed", "interrupted", "paused", "promoted", "running"} <= states.keys()
    assert any(rung.paused and rung.continued for rung in expected_rungs)


def make_paused(trial: int, *values: float) -> Evaluation:
    return make_evaluation(
        trial, "paused", values[0], other_values=values[1:], at_rungs={1: values}
    )


def test_rung_with_two_objectives_promotes_by_dominance() -> None:
    """A third of nine individuals continues.

    These are the three that no other individual dominates. All dominated individuals have lower
    losses than two of the three.
    """
    front = [make_paused(0, 0.9, 1.0), make_paused(1, 0.5, 5.0), make_paused(2, 0.1, 9.0)]
    behind = [make_paused(trial, 0.1 + trial / 100, 20.0 + trial) for trial in range(3, 9)]
    evaluations = [*front, *behind]
    assert [e.trial for e in find_promotable(ASHA, evaluations)] == [2, 3, 4], (
        "these have the lowest losses"
    )
    assert [e.trial for e in find_promotable(ASHA, evaluations, TWO)] == [2, 1, 0]
    (first,) = summarize_rungs(
        evaluations, make_manifest(pruner="asha", objectives=LOSS_AND_PARAMETERS)
    )
    assert (first.best, first.next) == (0.1, NextPromotion(2, 0.1, 1))
    fast = Objectives(("loss", "speed"), ("speed",))
    assert [e.trial for e in find_promotable(ASHA, evaluations, fast)] == [2, 8, 3], (
        "the ends of the other front, and the next one"
    )
    assert not is_search_over(evaluations, 9, "asha", TWO)
    ended = [
        make_evaluation(
            e.trial, "complete", *[e.loss] * 9, other_values=e.other_values, at_rungs={1: e.values}
        )
        for e in front
    ]
    assert is_search_over([*ended, *behind], 9, "asha", TWO)
    assert not is_search_over([*ended, *behind], 9, "asha")


def test_rung_without_recorded_objectives_uses_last_values() -> None:
    """Two complete evaluations have no recorded values at the rung, unless the test adds them.

    With their final values, trial 2 can be promoted. With the recorded values, it cannot.
    """
    before = [
        make_evaluation(trial, "complete", *[loss] * 9, other_values=(size,))
        for trial, loss, size in ((0, 0.5, 5.0), (1, 0.6, 6.0))
    ]
    late = [
        make_paused(2, 0.7, 1.0),
        make_paused(3, 0.8, 9.0),
        make_paused(4, 0.9, 9.0),
        make_paused(5, 0.9, 9.5),
    ]
    assert [e.trial for e in find_promotable(ASHA, [*before, *late], TWO)] == [2]
    known = [replace(e, at_rungs=dict.fromkeys((1, 3, 9), (e.loss, 0.5))) for e in before]
    assert find_promotable(ASHA, [*known, *late], TWO) == []
    running = make_evaluation(6, "running", *[0.01] * 3)
    assert [e.trial for e in find_promotable(ASHA, [*before, *late, running], TWO)] == [2], (
        "the values of trial 6 are unknown"
    )
    assert describe_blind_spot("asha", TWO, [*before, *late, running]).startswith(
        "warning: --pruner asha: 3 evaluations"
    )
    assert (
        describe_blind_spot("asha", TWO, [*known, *late])
        == describe_blind_spot("asha", ONLY_LOSS, before)
        == ""
    )
    assert "--pruner median compares only the loss" in describe_blind_spot("median", TWO, [])
    assert (
        describe_blind_spot("median", ONLY_LOSS, before)
        == describe_blind_spot("none", TWO, before)
        == ""
    )


def test_promoted_trial_without_recorded_objectives_keeps_place() -> None:
    old = [
        make_evaluation(trial, "paused", 0.5 + trial / 10, other_values=(float(trial),))
        for trial in range(6)
    ]
    assert [e.trial for e in find_promotable(ASHA, old, TWO)] == [0, 1]
    promoted = [replace(e, state="promoted") for e in old[:2]]
    running = [
        make_evaluation(6 + e.trial, "running", *e.curve.values(), retry_of=e.trial)
        for e in promoted
    ]
    assert find_promotable(ASHA, [*promoted, *old[2:], *running], TWO) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", HALVING_SCHEDULES)
def test_run_with_two_objectives_matches_its_record(tmp_path: Path, name: str) -> None:
    """Simulate three workers. Some of their evaluations fail or are interrupted."""
    halving, random_source, budget = HALVING_SCHEDULES[name], random.Random(5), 24
    record = make_run(tmp_path / "run", objectives=TWO)
    claims = Claims(record, SPACE.make_distributions(), budget, halving=halving)
    pausing, tracker = PausingPruner(halving, budget, TWO), SuccessiveHalving(halving, TWO)
    sizes: dict[int, float] = {}
    running: list[tuple[Assignment, list[float]]] = []
    for number in range(600):
        params = {"layers": 1, "activation": "relu", "lr": (number + 1) / 1000, "gamma": 0.9}
        if len(running) < 3 and (
            started := claims.claim(params, island=0, worker=0, generation=number)
        ):
            curve = (
                record.read_evaluations()[started.root].curve
                if started.root != started.number
                else {}
            )
            if curve and random_source.random() < 0.8:  # The others have lost their checkpoints.
                record.record_resume(started, list(curve.values()), 1.0)
                running.append((started, list(curve.values())))
            else:
                running.append((started, []))
        if not running:
            break
        assignment, losses = running.pop(random_source.randrange(len(running)))
        size = sizes.setdefault(assignment.root, random_source.random())
        losses.append(random_source.random() + 1 - size)
        record.report(assignment, len(losses), losses[-1])
        metrics, end = {"parameters": size}, random_source.random()
        decision = pausing.decide_pruning(record, assignment, len(losses), (min(losses), size))
        if end < 0.1:
            record.fail(assignment, "bad luck", "", 1.0) if end < 0.01 else record.interrupt(
                assignment
            )
        elif len(losses) == 9:
            record.complete(assignment, min(losses), 1.0, metrics)
        elif decision.state == "paused":
            record.prune(assignment, min(losses), 1.0, metrics, paused_after=len(losses))
        else:
            running.append((assignment, losses))
        evaluations = record.read_evaluations()
        now, again = (
            tracker.update(evaluations).list_rungs(),
            compute_rungs(halving, evaluations, TWO),
        )
        assert [(r, r.losses, r.promotable) for r in now] == [
            (r, r.losses, r.promotable) for r in again
        ]
    evaluations = record.read_evaluations()
    assert is_search_over(evaluations, budget, name, TWO)
    assert describe_blind_spot(name, TWO, evaluations) == ""
    states = {evaluation.state for evaluation in evaluations}
    assert states >= {"complete", "paused", "interrupted"} | (
        set() if name == "one-epoch" else {"promoted"}
    )


def test_summary_lists_next_promotions() -> None:
    evaluations = [
        make_evaluation(0, "complete", *[0.5] * 9),
        *(make_evaluation(trial, "paused", 0.5 + trial) for trial in (1, 2)),
        make_evaluation(3, "pruned", 4.0),
    ]
    (first, second) = summarize_rungs(evaluations, make_manifest(pruner="asha"))
    assert first == RungSummary(
        bracket=0,
        epochs=1,
        reached=4,
        continued=1,
        paused=2,
        pruned=1,
        best=0.5,
        next=NextPromotion(trial=1, loss=1.5, count_needed=6),
    )
    assert (second.epochs, second.next) == (3, None)
    assert summarize_rungs(evaluations, make_manifest(pruner="median")) == []
    over = summarize_rungs(evaluations, make_manifest(pruner="asha", budget=3))
    assert [rung.next for rung in over] == [None, None]


class HalvingRun:
    """Simulate a leader that claims, reports, pauses and ends evaluations, without MPI."""

    def __init__(self, folder: Path, budget: int) -> None:
        self.record: Record = make_run(folder / "run")
        self.budget = budget
        self.pausing = PausingPruner(ASHA, budget)
        self.claims = Claims(self.record, SPACE.make_distributions(), budget, halving=ASHA)
        self.drawn = 0

    def claim(self) -> Assignment | None:
        self.drawn += 1
        params = {"layers": 1, "activation": "relu", "lr": self.drawn / 1000, "gamma": 0.9}
        return self.claims.claim(params, island=0, worker=0, generation=self.drawn, propagator="ga")

    def train(self, assignment: Assignment, losses: Mapping[int, float], epochs: int) -> str:
        """Train an evaluation until it ends or pauses, and return its state.

        Args:
            assignment: The evaluation.
            losses: Its loss in each epoch.
            epochs: Number of epochs after which it ends.
        """
        started = self.record.read_evaluations()[assignment.root]
        for epoch in range(1, epochs + 1):
            self.record.report(assignment, epoch, losses[epoch])
            state = (
                self.pausing.decide_pruning(self.record, assignment, epoch).state
                if epoch > started.paused_after
                else "running"
            )
            if state == "paused":
                lowest = min(losses[epoch] for epoch in range(1, epoch + 1))
                self.record.prune(assignment, lowest, 1.0, {}, paused_after=epoch)
                return state
        self.record.complete(assignment, min(losses.values()), 1.0, {})
        return "complete"


def test_promoted_evaluation_is_new_trial_and_counts_once(tmp_path: Path) -> None:
    run, curves = HalvingRun(tmp_path, budget=6), {}
    for index, loss in enumerate((0.5, 0.7, 0.6, 0.9, 0.8, 0.4)):
        assignment = run.claim()
        assert assignment is not None
        curves[assignment.number] = {epoch: loss / epoch for epoch in range(1, 10)}
        expected = "complete" if index in (0, 5) else "paused"
        assert run.train(assignment, curves[assignment.number], 9) == expected
    reader = Record(run.record._storage, "run").follow()
    assert [(e.trial, e.state) for e in reader.read()][1:3] == [(1, "paused"), (2, "paused")]
    budget = run.budget
    assert not find_promotable(ASHA, run.record.read_evaluations()), (
        "two of six continue, and both have"
    )
    assert run.claim() is None
    assert is_search_over(run.record.read_evaluations(), budget, "asha")
    run.claims = Claims(run.record, SPACE.make_distributions(), budget + 3, halving=ASHA)
    for loss in (1.0, 1.1, 1.2):
        assignment = run.claim()
        assert assignment is not None
        run.train(assignment, {1: loss}, 1)
    assert not is_search_over(run.record.read_evaluations(), budget + 3, "asha")
    promoted = run.claim()
    assert promoted is not None
    assert (promoted.root, promoted.number, promoted.params) == (
        2,
        9,
        run.record.read_trials()[2].params,
    )
    state = {e.trial: e.state for e in run.record.read_evaluations()}
    assert (state[2], state[9]) == ("promoted", "running")
    assert (2, "promoted") in [(e.trial, e.state) for e in reader.read()]
    assert run.claim() is None, "a promotion must start once, and the budget is spent"
    assert run.train(promoted, curves[2], 9) == "paused", "two others are better at the next rung"
    assert run.record.read_evaluations()[9].paused_after == 3
    counts = Summary(run.record.read_evaluations(), make_manifest(budget=budget + 3), 3).counts
    assert counts == {
        "complete": 2,
        "pruned": 0,
        "paused": 7,
        "failed": 0,
        "running": 0,
        "budget": 9,
    }
    assert run.claim() is None
    assert run.record.find_resumable_roots() == {1, 2, 3, 4, 6, 7, 8}


def test_promoted_trial_without_checkpoint_passes_old_rung(tmp_path: Path) -> None:
    run = HalvingRun(tmp_path, budget=9)
    first = run.claim()
    assert first is not None
    assert run.train(first, dict.fromkeys(range(1, 10), 0.9), 9) == "complete"
    for assignment, losses in zip(
        [run.claim(), run.claim(), run.claim()],
        ((0.5, 0.4, 0.95), (0.1, 0.1, 0.3), (0.2, 0.2, 0.2)),
        strict=True,
    ):
        assert assignment is not None
        for epoch, loss in enumerate(losses, start=1):
            run.record.report(assignment, epoch, loss)
        run.record.prune(assignment, min(losses), 1.0, {}, paused_after=3)
    promoted = run.claim()
    assert promoted is not None
    assert promoted.root == 2
    for _ in range(4):
        better = run.claim()
        assert better is not None
        run.record.report(better, 1, 0.05)
    run.record.report(promoted, 1, 0.1)
    assert run.pausing.decide_pruning(run.record, promoted, 1).state == "running", (
        "the individual has passed this rung before"
    )


def test_imported_evaluation_reaches_no_rung() -> None:
    evaluations = [
        *(
            make_evaluation(trial, "complete", *[0.1] * 9, imported_from="trial 0 of runs/before")
            for trial in range(9)
        )
    ]
    evaluations += [make_evaluation(9, "paused", 0.5), make_evaluation(10, "paused", 0.6)]
    (rung,) = compute_rungs(ASHA, evaluations)
    assert [root for _, root in rung.losses] == [9, 10]
    assert [e.trial for e in find_promotable(ASHA, evaluations)] == [9]


def test_suspect_of_two_crashes_waits_for_promotions(tmp_path: Path) -> None:
    run = HalvingRun(tmp_path, budget=2)
    suspect, other = run.claim(), run.claim()
    assert suspect is not None
    assert other is not None
    for epoch, loss in ((1, 0.5), (2, 0.5)):
        run.record.report(other, epoch, loss)
    run.record.prune(other, 0.5, 1.0, {}, paused_after=1)
    trial = run.record.read_trials()[suspect.number]
    run.record.enqueue(trial.params, trial.distributions, retry_of=suspect.number, crash_count=2)
    run.record._storage.set_trial_user_attr(suspect.trial_id, "failure", "interrupted")
    run.record._storage.set_trial_state_values(suspect.trial_id, TrialState.FAIL)
    claims = Claims(run.record, SPACE.make_distributions(), 2, halving=ASHA)
    promoted = claims.claim(None, island=0, worker=0, generation=0)
    assert promoted is not None
    assert promoted.root == other.number
    assert claims.claim(None, island=0, worker=1, generation=0) is None, "a suspect must run alone"
    run.record.complete(promoted, 0.4, 1.0, {})
    alone = claims.claim(None, island=0, worker=0, generation=0)
    assert alone is not None
    assert alone.root == suspect.number


def test_attributes_of_other_programs_are_not_pause_or_parent(tmp_path: Path) -> None:
    run = HalvingRun(tmp_path, budget=9)
    for attributes in (
        {"retry_of": 99, "inherits": 99, "paused_after": "x"},
        {"retry_of": "a", "inherits": 1, "paused_after": 1},
        {"retry_of": 1, "inherits": [0], "paused_after": -1},
    ):
        assignment = run.claim()
        assert assignment is not None
        for name, value in attributes.items():
            run.record._storage.set_trial_user_attr(assignment.trial_id, name, value)
        run.record._storage.set_trial_state_values(assignment.trial_id, TrialState.PRUNED, None)
    evaluations = run.record.read_evaluations()
    assert [e.inherits for e in evaluations] == [None, None, None]
    assert [e.retry_of for e in evaluations] == [None, None, 1]
    assert summarize_rungs(evaluations, make_manifest(pruner="asha")) == []
    assert run.claims.claim(None, island=0, worker=0, generation=0) is None
    assert Summary(evaluations, make_manifest(budget=9, pruner="asha"), 3).lineage == []


def test_promotion_is_claimed_by_one_of_two_leaders(tmp_path: Path) -> None:
    run = HalvingRun(tmp_path, budget=4)
    first, second = run.claim(), run.claim()
    assert first is not None
    assert second is not None
    run.record.report(first, 1, 0.9)
    run.record.report(second, 1, 0.5)
    run.record.prune(second, 0.5, 1.0, {}, paused_after=1)
    writer = make_writer(run.record, tmp_path / "run", 4, halving=ASHA)
    leader, other = make_client(writer), make_client(writer)
    params = {**run.record.read_trials()[1].params, "lr": 0.25}
    promoted = leader.claim(params, island=0, worker=0, generation=1)
    assert promoted is not None
    assert promoted.root == 1
    with pytest.raises(DuplicateError):
        other.claim(run.record.read_trials()[0].params, island=0, worker=1, generation=0)
    another = other.claim({**promoted.params, "lr": 0.5}, island=0, worker=1, generation=0)
    assert another is not None
    assert another.root == another.number == 3


def test_interrupted_promotion_resumes_from_same_checkpoint(tmp_path: Path) -> None:
    run = HalvingRun(tmp_path, budget=1)
    assignment = run.claim()
    assert assignment is not None
    run.record.report(assignment, 1, 0.5)
    run.record.prune(assignment, 0.5, 1.0, {}, paused_after=1)
    promoted = run.claim()
    assert promoted is not None
    assert run.record.requeue_interrupted() == 1
    assert [e.state for e in run.record.read_evaluations()] == [
        "promoted",
        "interrupted",
        "waiting",
    ]
    assert run.record.find_resumable_roots() == {0}
    claims = Claims(run.record, SPACE.make_distributions(), 1, halving=ASHA)
    again = claims.claim(None, island=0, worker=0, generation=0)
    assert again is not None
    assert (again.number, again.root) == (2, 0)
    assert claims.claim(None, island=0, worker=0, generation=0) is None


def test_eliminated_evaluation_loses_its_checkpoint(tmp_path: Path) -> None:
    """Of six individuals, two can continue.

    So the third best and all worse ones can never be promoted.
    """
    run = HalvingRun(tmp_path, budget=6)
    states, may_be_promoted, eliminated = [], [], []
    for loss in (0.5, 0.7, 0.6, 0.8, 0.55):
        assignment = run.claim()
        assert assignment is not None
        run.record.report(assignment, 1, loss)
        decision = run.pausing.decide_pruning(run.record, assignment, 1)
        states.append(decision.state)
        may_be_promoted.append(decision.may_be_promoted)
        eliminated.append(list(decision.eliminated))
        if decision.state == "paused":
            run.record.prune(assignment, loss, 1.0, {}, paused_after=1)
    assert states == ["running", "paused", "paused", "paused", "paused"]
    assert may_be_promoted == [True, True, True, False, True]
    assert eliminated == [[], [], [1], [1], [2, 1, 3]]
