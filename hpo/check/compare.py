"""Comparing evaluations of one individual: of the same ranks, of all ranks and one, and of the ranks of one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from hpo.check.bench import Outcome
from hpo.check.point import Point
from hpo.check.training import (
    FEW,
    TOLERANCE,
    compare_networks,
    compare_training,
    differ,
    has_same_parameters,
    has_samples,
    relative,
)
from hpo.process.seen import Seen, distance
from hpo.text import counted


def repeated(first: Outcome, again: Outcome) -> Point:
    """Return whether the same seed had the same losses twice."""
    text = f"The same seed on {counted(first.ranks, 'rank')}"
    if first.seen[0].steps and not again.seen[0].steps:
        return Point(
            "look",
            f"{text}: the second evaluation took no step, so that nothing was compared",
            "It seems to go on from a checkpoint of the first: delete it, since a search would go on from it too",
        )
    off = _off(first.losses, again.losses)
    if off <= TOLERANCE:
        return Point("ok", f"{text} has the same losses twice{_within(off)}")
    begin, began = first.seen[0].weights.get(0), again.seen[0].weights.get(0)
    if begin and began and differ(begin, began):
        return Point(
            "wrong",
            f"{text} has other losses the second time, {relative(off)} off: the network begins with other weights",
            "Make the network in the objective, and draw its weights there: what is kept outside of it, in the module, "
            "goes on from evaluation to evaluation",
        )
    return Point(
        "look",
        f"{text} has other losses the second time, {relative(off)} off, from the same first weights",
        "Something draws without worker.seed: loader processes, a Generator, the clock; or it counts evaluations",
    )


def continued(whole: Outcome, went_on: Outcome) -> Point:
    """Return whether an evaluation that went on from its first loss had the losses of one that was not interrupted."""
    if len(whole.losses) == 1:
        return Point("look", "It saves its state with its only loss", "Two losses show whether it goes on: epochs=2")
    off = _off(whole.losses, went_on.losses)
    if off <= TOLERANCE and len(whole.losses) == len(went_on.losses):
        return Point("ok", f"It goes on from what it has saved with its first loss: the same losses{_within(off)}")
    found = f"{relative(off)} off" if off > TOLERANCE else f"{len(went_on.losses)} for {len(whole.losses)}"
    return Point(
        "wrong",
        f"It goes on from what it has saved with its first loss with other losses, {found}",
        "Whatever changes while training belongs into the saved state, before the loss: the optimizer, the schedule, "
        "generators, the number of epochs; what is drawn anew in each epoch begins at a seed of its own",
    )


def compared(whole: Outcome, alone: Outcome) -> Iterator[Point]:
    """Yield whether all ranks and 1 rank have the same losses, and if not, what is likely to be the cause.

    Only what is not explained is wrong by itself, and causes that are mistakes on any number of ranks.
    """
    ranks, off = counted(whole.ranks, "rank"), _off(whole.losses, alone.losses)
    if len(whole.losses) != len(alone.losses):
        text = f"There are {counted(len(whole.losses), 'loss')[:-1]}es on {ranks}, and {len(alone.losses)} on 1"
        yield Point("look", text, "Should the number of epochs depend on the number of ranks?")
    if off <= TOLERANCE:
        yield Point("ok", f"{ranks} and 1 rank have the same losses{_within(off)}")
        yield from (Point("look", cause.text, cause.advice) for cause in compare_training(whole, alone))
        return
    text = f"The losses of {ranks} and of 1 rank are {relative(off)} off"
    is_apart = compare_networks(whole, alone) is not None
    causes = [] if is_apart else list(_causes(whole, alone))
    if causes or is_apart:
        yield Point("look", text)
        yield from causes
    else:
        yield Point("wrong" if has_samples(whole, alone) else "look", text, _unexplained(whole, alone))


def _causes(whole: Outcome, alone: Outcome) -> Iterator[Point]:
    """Yield why losses on all ranks may differ from those on one, the surest alone, or all that may be."""
    ratios = [ours / theirs for ours, theirs in zip(whole.losses, alone.losses, strict=False) if theirs]
    layers = list(_layers(whole.seen[0]))
    for factor in (whole.ranks, 1 / whole.ranks):
        if all(math.isclose(ratio, factor, rel_tol=FEW if layers else FEW / 10) for ratio in ratios):
            yield Point(
                "wrong",
                f"They are {factor:.3g} times those of 1 rank",
                "Divide the sum over all ranks by the number of all validation samples, or take the mean of all ranks' "
                "means only where their shares are equally large",
            )
            return
    if has_same_parameters(whole, alone) and differ(whole.seen[0].weights[0], alone.seen[0].weights[0]):
        yield Point(
            "look",
            "The network begins with other weights on 1 rank",
            "Draw the weights before anything that depends on the rank, or on the number of ranks",
        )
        return
    training = list(compare_training(whole, alone))
    yield from training
    if all(cause.state == "look" for cause in training):
        yield from layers
        if not training and not layers:
            yield from _shared(whole.seen[0])


def _unexplained(whole: Outcome, alone: Outcome) -> str:
    ours, theirs = whole.seen[0].at_loss[:1], alone.seen[0].at_loss[:1]
    if has_same_parameters(whole, alone) and ours and theirs and ours[0] and len(ours[0]) == len(theirs[0]):
        if distance(ours[0], theirs[0]) <= TOLERANCE:
            return (
                "The networks are the same at the first loss, so it is the validation: is it the loss of all samples, "
                "each once, the sums of all ranks divided by the number of all?"
            )
        return (
            "The first step's gradients are the same, and the networks are not at the first loss. Where shares of the "
            "last batch differ in size, weight them: reduction='sum', and (loss * worker.size / len(batch)).backward()"
        )
    return (
        "Nothing that was looked at explains it. Is the loss that of all validation samples: sums over all ranks, "
        "divided by the number of all? Are the ranks' shares of a batch weighted by their sizes?"
    )


def _layers(seen: Seen) -> Iterator[Point]:
    if seen.normal.total():
        yield Point(
            "look",
            f"{_named(seen.normal)}: each rank normalises by its own share of a batch",
            "nn.SyncBatchNorm.convert_sync_batchnorm(network) on GPUs, or GroupNorm or LayerNorm, does not depend on "
            "the number of ranks",
        )
    if seen.noisy:
        yield Point(
            "look",
            f"{_named(seen.noisy)}: each rank draws for its own share, so that losses differ a little",
            "To see whether anything else differs, check once with a probability of 0, or without random numbers",
        )


def _shared(seen: Seen) -> Iterator[Point]:
    if seen.shared.total():
        yield Point(
            "look",
            f"{_named(seen.shared)}: normalised by all ranks' samples, which lets rounding grow from step to step",
            "To see whether anything else differs, check once with fewer steps, and a lower learning rate",
        )


def _off(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the largest relative difference of losses of the same epoch."""
    pairs = list(zip(ours, theirs, strict=False))
    return max((abs(a - b) / max(abs(a), abs(b)) for a, b in pairs if a != b), default=0.0)


def _within(off: float) -> str:
    return f", within {off:.0e}" if off else ", to the last digit"


def _named(layers: Counter[str]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in layers.items() if count)
