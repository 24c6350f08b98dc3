"""Comparing evaluations of one individual: of the same ranks, of all ranks and one, and of the ranks of one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

from hpo.check.bench import Outcome
from hpo.check.point import Point
from hpo.process.seen import Print, Seen, distance, length
from hpo.text import counted

# Relative. Ranks that take the mean of their gradients have the same weights to the last bit; of networks that are
# trained alike on 1 and on 2 or 3 ranks, losses differed by 1e-7 after three epochs (float32, Adam and Adadelta on
# digits), and first gradients by 3e-7.
_SAME = 1e-9
_TOLERANCE = 1e-4
# Of ResNet-18 in float32: first gradients were 4e-3 off on one rank where a batch merely listed its samples in another
# order, and 1e-14 in float64.
_NORMALISED = 0.02
_FEW = 0.1  # of the samples, which a sampler may repeat or leave out to give all ranks as many


def unlike(outcome: Outcome) -> Point | None:
    """Return what is wrong where the ranks' networks are not the same; None where they are, or cannot be compared."""
    first, *others = outcome.seen
    if outcome.failure and "different losses" not in outcome.failure:
        return None
    if first.sharded or any(other.shapes != first.shapes for other in others):
        return None
    if any(other.steps != first.steps for other in others):
        steps = ", ".join(f"rank {rank} {one.steps}" for rank, one in enumerate(outcome.seen))
        return Point(
            "wrong",
            f"The ranks take different numbers of steps: {steps}",
            "Give all ranks as many batches: DistributedSampler does, or batch[worker.rank :: worker.size] of each",
        )
    for key, weights in sorted(first.weights.items(), key=lambda item: item[0][1]):
        for rank, other in enumerate(others, start=1):
            if key in other.weights and not distance(weights, other.weights[key]) <= _SAME:
                return Point("wrong", _apart(key[1], rank), _WRAP)
    return None


_WRAP = (
    "Each rank trains a network of its own, on its share of the samples. Wrap it, model = "
    "DistributedDataParallel(network), and call model(inputs) to train, not network or model.module: only then are "
    "gradients averaged"
)


def _apart(steps: int, rank: int) -> str:
    when = f"after {counted(steps, 'step')}" if steps else "before the first step"
    return f"The networks of rank 0 and rank {rank} differ {when}"


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
    if off <= _TOLERANCE:
        return Point("ok", f"{text} has the same losses twice{_within(off)}")
    begin, began = first.seen[0].weights.get((0, 0)), again.seen[0].weights.get((0, 0))
    if begin and began and _differ(begin, began):
        return Point(
            "wrong",
            f"{text} has other losses the second time, {_shown(off)} off: the network begins with other weights",
            "Make the network in the objective, and draw its weights there: what is kept outside of it, in the module, "
            "goes on from evaluation to evaluation",
        )
    return Point(
        "look",
        f"{text} has other losses the second time, {_shown(off)} off, from the same first weights",
        "Something draws without worker.seed: loader processes, a Generator, the clock; or it counts evaluations",
    )


def continued(whole: Outcome, went_on: Outcome) -> Point:
    """Return whether an evaluation that went on from its first loss had the losses of one that was not interrupted."""
    if len(whole.losses) == 1:
        return Point("look", "It saves its state with its only loss", "Two losses show whether it goes on: epochs=2")
    off = _off(whole.losses, went_on.losses)
    if off <= _TOLERANCE and len(whole.losses) == len(went_on.losses):
        return Point("ok", f"It goes on from what it has saved with its first loss: the same losses{_within(off)}")
    found = f"{_shown(off)} off" if off > _TOLERANCE else f"{len(went_on.losses)} for {len(whole.losses)}"
    return Point(
        "wrong",
        f"It goes on from what it has saved with its first loss with other losses, {found}",
        "Whatever changes while training belongs into worker.save, before the yield: the optimizer, the schedule, "
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
    if off <= _TOLERANCE:
        yield Point("ok", f"{ranks} and 1 rank have the same losses{_within(off)}")
        yield from (Point("look", cause.text, cause.advice) for cause in _of_training(whole, alone))
        return
    text = f"The losses of {ranks} and of 1 rank are {_shown(off)} off"
    causes = [] if unlike(whole) else list(_causes(whole, alone))
    if causes or unlike(whole):
        yield Point("look", text)
        yield from causes
    else:
        yield Point("wrong", text, _unexplained(whole, alone))


def _causes(whole: Outcome, alone: Outcome) -> Iterator[Point]:
    """Yield why losses on all ranks may differ from those on one, the surest alone, or all that may be."""
    ratios = [ours / theirs for ours, theirs in zip(whole.losses, alone.losses, strict=False) if theirs]
    layers = list(_layers(whole.seen[0]))
    for factor in (whole.ranks, 1 / whole.ranks):
        if all(math.isclose(ratio, factor, rel_tol=_FEW if layers else _FEW / 10) for ratio in ratios):
            yield Point(
                "wrong",
                f"They are {factor:.3g} times those of 1 rank",
                "Divide the sum over all ranks by the number of all validation samples, or take the mean of all ranks' "
                "means only where their shares are equally large",
            )
            return
    if _is_whole(whole, alone) and _differ(whole.seen[0].weights[0, 0], alone.seen[0].weights[0, 0]):
        yield Point(
            "wrong",
            "The network begins with other weights on 1 rank",
            "Draw the weights before anything that depends on the rank, or on the number of ranks",
        )
        return
    training = list(_of_training(whole, alone))
    yield from training
    if all(cause.state == "look" for cause in training):
        yield from layers
        if not training and not layers:
            yield from _shared(whole.seen[0])


def _of_training(whole: Outcome, alone: Outcome) -> Iterator[Point]:
    """Yield the first thing that is seen to be different in training itself."""
    many, one = whole.seen[0], alone.seen[0]
    samples = list(_samples(whole, alone))
    if samples:
        yield from samples
    elif _steps(many) != _steps(one):
        yield Point(
            "look",
            f"An epoch has {counted(_steps(many), 'step')} on {counted(whole.ranks, 'rank')} and {_steps(one)} on 1: a "
            "global batch of another size",
            "Where the batch size is the global one, a rank takes batch_size // worker.size of it; otherwise learning "
            "rates that are good on one number of ranks are not on another",
        )
    elif _is_whole(whole, alone) and not list(_layers(many)):
        yield from _gradients(whole.ranks, many, one, "wrong" if any(hashes for _, hashes in one.samples) else "look")


def _unexplained(whole: Outcome, alone: Outcome) -> str:
    ours, theirs = whole.seen[0].at_loss[:1], alone.seen[0].at_loss[:1]
    if _is_whole(whole, alone) and ours and theirs and ours[0] and len(ours[0]) == len(theirs[0]):
        if distance(ours[0], theirs[0]) <= _TOLERANCE:
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
            "To see whether anything else differs, check once with a probability of 0",
        )


def _shared(seen: Seen) -> Iterator[Point]:
    if seen.shared.total():
        yield Point(
            "look",
            f"{_named(seen.shared)}: normalised by all ranks' samples, which lets rounding grow from step to step",
            "To see whether anything else differs, check once with fewer steps, and a lower learning rate",
        )


def _samples(whole: Outcome, alone: Outcome) -> Iterator[Point]:
    """Yield what is different about the samples that the ranks trained on until the first loss, each of them hashed."""
    ours, theirs = _until_loss(alone), _until_loss(whole)
    if not ours or not theirs or not _is_whole(whole, alone):
        return
    found, ranks = ours.keys() & theirs.keys(), counted(whole.ranks, "rank")
    if sum(theirs[hash_] for hash_ in found) < (1 - _FEW / 10) * theirs.total():
        yield Point(
            "look",
            "The network is given other samples than on 1 rank; changed at random, perhaps, by each rank for its share",
            "To see whether anything else differs, check once without augmentation",
        )
    elif len(found) < (1 - _FEW) * len(ours):
        yield Point(
            "wrong",
            f"Of the {len(ours)} samples of 1 rank's first epoch, {ranks} train on {len(found)}"
            f"{', and on some of them more than once' if theirs.total() > len(found) else ''}",
            "The order of the samples has to be the same on all ranks, which then take shares of it: give "
            "torch.randperm a Generator, torch.Generator().manual_seed(worker.seed + epoch)",
        )
    elif theirs.total() > (whole.ranks - _FEW) * ours.total():
        yield Point(
            "look",
            f"Each of {ranks} trains on all {len(ours)} samples, as 1 rank does",
            "A worker of more ranks is no faster then: let each rank take its share, batch[worker.rank :: worker.size]",
        )


def _until_loss(outcome: Outcome) -> Counter[bytes]:
    """Return the samples of the first epoch, on all ranks, by their hashes."""
    limit = _steps(outcome.seen[0])
    return Counter(one for seen in outcome.seen for steps, hashes in seen.samples if steps < limit for one in hashes)


def _gradients(ranks: int, many: Seen, one: Seen, state: Literal["look", "wrong"]) -> Iterator[Point]:
    """Yield what is different about the first step's gradients; it is not wrong where the samples are not known."""
    ours, theirs = many.gradients[0], one.gradients[0]
    off = distance(ours, theirs)
    if not off > (_NORMALISED if many.shared else _TOLERANCE):
        return
    ratio = length(ours) / length(theirs) if length(theirs) else math.nan
    if math.isclose(ratio, ranks, rel_tol=_TOLERANCE) or math.isclose(ratio, 1 / ranks, rel_tol=_TOLERANCE):
        yield Point(
            "wrong",
            f"The gradients of the first step are {ratio:.3g} times those of 1 rank",
            "DistributedDataParallel takes the mean over ranks: where each rank adds up its share's losses and divides "
            "by the global batch, multiply by worker.size: (loss * worker.size / len(batch)).backward()",
        )
        return
    yield Point(
        state,
        f"The gradients of the first step are {_shown(off)} off those of 1 rank",
        "Where the ranks' shares of a batch differ in size, a mean of their means is not the mean: "
        "reduction='sum', and (loss * worker.size / len(batch)).backward()",
    )


def _is_whole(whole: Outcome, alone: Outcome) -> bool:
    """Tell whether all ranks hold the same network as 1 rank does, each of them all of it."""
    shapes = alone.seen[0].shapes
    return bool(shapes) and not any(one.sharded or one.shapes != shapes for one in [*whole.seen, *alone.seen])


def _steps(seen: Seen) -> int:
    """Return the steps of the first epoch."""
    return seen.until[0] if seen.until else seen.steps


def _differ(one: Print, other: Print) -> bool:
    return len(one) != len(other) or not distance(one, other) <= _SAME


def _off(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the largest relative difference of losses of the same epoch."""
    pairs = list(zip(ours, theirs, strict=False))
    return max((abs(a - b) / max(abs(a), abs(b)) for a, b in pairs if a != b), default=0.0)


def _within(off: float) -> str:
    return f", within {off:.0e}" if off else ", to the last digit"


def _shown(off: float) -> str:
    return f"{off:.1%}" if off >= 0.001 else f"{off:.0e}"


def _named(layers: Counter[str]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in layers.items() if count)
