"""What a check finds: a point for each thing that was looked at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpo.check.advice import advice_on, listed
from hpo.check.bench import Handed, Outcome
from hpo.check.compare import compared, continued, repeated
from hpo.check.point import Point
from hpo.check.training import compare_networks
from hpo.problem import Problem
from hpo.text import counted, duration, short

_LONGEST = 400  # characters of a failure


def points_on(problem: Problem, outcomes: Sequence[Outcome], went_on: Outcome | None, handed: Handed) -> list[Point]:
    """Return what was found in evaluations on all ranks, again on all ranks, and on 1 rank, as far as there are any.

    `went_on` is the one on all ranks that went on from the first loss of another.
    """
    points = [*_on_evaluations(outcomes), *_on_gradients(outcomes)]
    if problem.file.script is None:
        points += _on_what_is_kept(problem, outcomes, went_on, handed)
    elif went_on is not None:
        points += _on_states(outcomes, went_on)
    return points


def is_well(points: Sequence[Point]) -> bool:
    """Tell whether nothing is wrong."""
    return all(point.state != "wrong" for point in points)


def _on_evaluations(outcomes: Sequence[Outcome]) -> Iterator[Point]:
    whole, last = outcomes[0], outcomes[-1]
    alone = last if last.ranks < whole.ranks else None
    yield from _failures(whole, alone)
    if apart := compare_networks(whole, alone):
        yield apart
    if whole.failure:
        return
    if outcomes[1].failure:
        yield Point(
            "wrong", f"It fails the second time: {short(outcomes[1].failure, _LONGEST)}", advice_on(outcomes[1])
        )
        return
    again = repeated(whole, outcomes[1])
    yield again
    if alone is None:
        yield Point(
            "look", "Nothing was compared with more ranks", "mpirun -n 2 hpo check does, for workers of 2 ranks"
        )
    elif not alone.failure and again.state == "ok":
        yield from compared(whole, alone)


def _failures(whole: Outcome, alone: Outcome | None) -> Iterator[Point]:
    if whole.failure:
        others = "" if alone is None else " and on 1" if alone.failure else ", and not on 1"
        where = f"{counted(whole.ranks, 'rank')}{others}"
        yield Point("wrong", f"It fails on {where}: {short(whole.failure, _LONGEST)}", advice_on(whole))
    elif alone is not None and alone.failure:
        yield Point("wrong", f"It fails on 1 rank alone: {short(alone.failure, _LONGEST)}", advice_on(alone))


def _on_gradients(outcomes: Sequence[Outcome]) -> Iterator[Point]:
    seen = next((one.seen[0] for one in outcomes if one.seen[0].shapes), None)
    if seen is None:
        if not any(one.failure for one in outcomes):
            yield Point("look", "No optimizer of torch took a step", "Nothing is known of gradients, steps and weights")
        return
    if outcomes[0].failure:
        return
    missing = sorted({name for one in outcomes[0].seen for name in one.without_gradient})
    if missing:
        yield Point(
            "look",
            f"{counted(len(missing), 'parameter')} of the optimizer never had a gradient: {listed(missing)}",
            "They stay as they are. If that is meant, freeze them, requires_grad_(False), and leave them out",
        )
    else:
        yield Point("ok", "All parameters of the optimizer had gradients")


def _on_what_is_kept(
    problem: Problem, outcomes: Sequence[Outcome], went_on: Outcome | None, handed: Handed
) -> Iterator[Point]:
    yield from _on_weights(problem, outcomes[0], handed)
    yield from _on_states(outcomes, went_on)


def _on_states(outcomes: Sequence[Outcome], went_on: Outcome | None) -> Iterator[Point]:
    if outcomes[0].failure or outcomes[1].failure:
        return
    if went_on is None:
        yield Point("ok", "No state is saved, which is optional: an interrupted evaluation begins again")
    elif went_on.rejected or went_on.failure:
        yield Point(
            "wrong",
            f"It cannot go on from what it has saved: {short(went_on.rejected or went_on.failure, _LONGEST)}",
            "Save what a new network, optimizer and so on of these hyperparameters take by load_state_dict",
        )
    elif not went_on.evaluation.resumed_from_step:
        yield Point(
            "wrong",
            "It saves its state, and begins again all the same",
            "At its start, load worker.checkpoint (hpo.checkpoint in a script), and train the epochs that are left",
        )
    elif repeated(*outcomes[:2]).state == "ok":
        yield continued(outcomes[1], went_on)


def _on_weights(problem: Problem, whole: Outcome, handed: Handed) -> Iterator[Point]:
    if whole.failure:
        return
    tests = problem.file.has_test
    if not whole.offered:
        text = "No weights are offered, so that none of the best network will be kept"
        yield Point(
            "wrong" if tests else "look",
            f"{text}, and `test` will not be called" if tests else text,
            "worker.offer_weights(network.state_dict()) before each yield, on rank 0 at least",
        )
        return
    if handed.names is None:
        yield Point("wrong", "The weights that are offered could not be kept")
        return
    prefixed = [name for name in handed.names if name.startswith("module.")]
    if prefixed:
        yield Point(
            "wrong",
            f"The names of the weights that are offered begin with module.: {listed(prefixed)}",
            "They do not fit the network itself: worker.offer_weights(model.module.state_dict())",
        )
    else:
        yield Point("ok", f"{counted(len(handed.names), 'tensor')} of weights are offered")
    if handed.failure:
        yield Point(
            "wrong", f"`test` fails with them: {handed.failure}", "A run would have no result on test data, at its end"
        )
    elif handed.seconds is not None:
        yield Point("ok", f"`test` takes them, in {duration(handed.seconds)}")
    else:
        yield Point("ok", "There is no `test`, which is optional")
