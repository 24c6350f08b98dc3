"""Make the findings of a check about failures, losses, gradients, weights and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpo.check.check_evaluator import CheckOutcome, WeightsTest
from hpo.check.failure_advice import find_failure_advice, format_name_list
from hpo.check.finding import Finding
from hpo.check.loss_comparison import compare_continuation, compare_rank_counts, compare_repetition
from hpo.check.training_comparison import compare_networks
from hpo.problem import Problem
from hpo.text_format import cut_text, format_count, format_duration

_MAX_FAILURE_LENGTH = 400  # Characters of a failure that are shown.


def inspect_outcomes(
    problem: Problem, outcomes: Sequence[CheckOutcome], went_on: CheckOutcome | None, handed: WeightsTest
) -> list[Finding]:
    """Return the findings about the evaluations of a check.

    Args:
        outcomes: The outcomes of two evaluations on all ranks, and of one evaluation on 1 rank. Later ones may be
            missing.
        went_on: The outcome of the evaluation that resumed from the checkpoint of the second one; None without a
            checkpoint.
        handed: The result of calling the user's `test`.
    """
    points = [*_inspect_evaluations(outcomes), *_inspect_gradients(outcomes)]
    if problem.file.script is None:
        points += _inspect_saved_data(problem, outcomes, went_on, handed)
    elif went_on is not None:
        points += _inspect_checkpoints(outcomes, went_on)
    return points


def has_passed(points: Sequence[Finding]) -> bool:
    """Return whether no finding has the level "wrong"."""
    return all(point.level != "wrong" for point in points)


def _inspect_evaluations(outcomes: Sequence[CheckOutcome]) -> Iterator[Finding]:
    whole, last = outcomes[0], outcomes[-1]
    alone = last if last.ranks < whole.ranks else None
    yield from _inspect_failures(whole, alone)
    if apart := compare_networks(whole, alone):
        yield apart
    if whole.failure:
        return
    if outcomes[1].failure:
        yield Finding(
            "wrong",
            f"The second evaluation fails: {cut_text(outcomes[1].failure, _MAX_FAILURE_LENGTH)}",
            find_failure_advice(outcomes[1]),
        )
        return
    again = compare_repetition(whole, outcomes[1])
    yield again
    if alone is None:
        yield Finding("look", "Only 1 rank was checked", "Compare numbers of ranks with mpirun -n 2 hpo check")
    elif not alone.failure and again.level == "ok":
        yield from compare_rank_counts(whole, alone)


def _inspect_failures(whole: CheckOutcome, alone: CheckOutcome | None) -> Iterator[Finding]:
    if whole.failure:
        others = "" if alone is None else " and on 1" if alone.failure else ", but not on 1"
        where = f"{format_count(whole.ranks, 'rank')}{others}"
        yield Finding(
            "wrong",
            f"The evaluation fails on {where}: {cut_text(whole.failure, _MAX_FAILURE_LENGTH)}",
            find_failure_advice(whole),
        )
    elif alone is not None and alone.failure:
        yield Finding(
            "wrong",
            f"The evaluation fails on 1 rank only: {cut_text(alone.failure, _MAX_FAILURE_LENGTH)}",
            find_failure_advice(alone),
        )


def _inspect_gradients(outcomes: Sequence[CheckOutcome]) -> Iterator[Finding]:
    trace = next((outcome.traces[0] for outcome in outcomes if outcome.traces[0].shapes), None)
    if trace is None:
        if not any(outcome.failure for outcome in outcomes):
            yield Finding("look", "No optimizer of torch took a step", "Gradients, steps and weights were not checked")
        return
    if outcomes[0].failure:
        return
    missing = sorted({name for trace in outcomes[0].traces for name in trace.without_gradient})
    if missing:
        yield Finding(
            "look",
            f"{format_count(len(missing), 'parameter')} of the optimizer never had a gradient: "
            f"{format_name_list(missing)}",
            "They never change. If this is intended, freeze them by requires_grad_(False), and leave them out",
        )
    else:
        yield Finding("ok", "All parameters of the optimizer had gradients")


def _inspect_saved_data(
    problem: Problem, outcomes: Sequence[CheckOutcome], went_on: CheckOutcome | None, handed: WeightsTest
) -> Iterator[Finding]:
    yield from _inspect_weights(problem, outcomes[0], handed)
    yield from _inspect_checkpoints(outcomes, went_on)


def _inspect_checkpoints(outcomes: Sequence[CheckOutcome], went_on: CheckOutcome | None) -> Iterator[Finding]:
    if outcomes[0].failure or outcomes[1].failure:
        return
    if went_on is None:
        yield Finding("ok", "No checkpoint is saved. It is optional: without one, an interrupted evaluation restarts")
    elif went_on.rejection or went_on.failure:
        yield Finding(
            "wrong",
            f"The evaluation cannot resume from its checkpoint: "
            f"{cut_text(went_on.rejection or went_on.failure, _MAX_FAILURE_LENGTH)}",
            "Save a state that a new network and optimizer with the same hyperparameters can load",
        )
    elif not went_on.evaluation.resumed_from_step:
        yield Finding(
            "wrong",
            "It saves checkpoints, but restarts instead of resuming",
            "At the start, load worker.checkpoint (hpo.checkpoint in a script), and train the remaining epochs",
        )
    elif compare_repetition(*outcomes[:2]).level == "ok":
        yield compare_continuation(outcomes[1], went_on)


def _inspect_weights(problem: Problem, whole: CheckOutcome, handed: WeightsTest) -> Iterator[Finding]:
    if whole.failure:
        return
    tests = problem.file.has_test
    if not whole.has_offered_weights:
        text = "No weights are offered, so the run cannot keep those of the best network"
        yield Finding(
            "wrong" if tests else "look",
            f"{text}, and `test` will not be called" if tests else text,
            "Call worker.offer_weights(network.state_dict()) before each yield, at least on rank 0",
        )
        return
    if handed.weight_names is None:
        yield Finding("wrong", "The offered weights could not be kept")
        return
    prefixed = [name for name in handed.weight_names if name.startswith("module.")]
    if prefixed:
        yield Finding(
            "wrong",
            f"The names of the offered weights begin with module.: {format_name_list(prefixed)}",
            "The network itself cannot load them. Call worker.offer_weights(model.module.state_dict())",
        )
    else:
        yield Finding("ok", f"The offered weights have {format_count(len(handed.weight_names), 'tensor')}")
    if handed.failure:
        yield Finding(
            "wrong",
            f"`test` fails with the offered weights: {handed.failure}",
            "A run would end without a result on test data",
        )
    elif handed.seconds is not None:
        yield Finding("ok", f"`test` accepts the offered weights, and takes {format_duration(handed.seconds)}")
    else:
        yield Finding("ok", "There is no `test`. It is optional")
