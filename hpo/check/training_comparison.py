"""Compare the training of one individual between the ranks of a worker, and with its training on 1 rank.

The networks of the ranks are compared with each other. Samples, steps and gradients are compared with 1 rank. In this
module, `whole` is the evaluation on all ranks, and `alone` is the evaluation on 1 rank. A fingerprint is two numbers
per parameter.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Literal

from hpo.check.check_evaluator import CheckOutcome
from hpo.check.finding import Finding
from hpo.process.trace import Fingerprint, Trace, compute_distance, compute_norm
from hpo.text_format import format_count

# Relative tolerances. Ranks that average their gradients have equal weights to the last bit. For the same training on
# 1 and on 2 or 3 ranks, losses differed by 1e-7 after three epochs (float32, Adam and Adadelta on digits), and first
# gradients by 3e-7.
_FINGERPRINT_TOLERANCE = 1e-9
TOLERANCE = 1e-4
# Another order of the samples in a batch changed the first gradients of ResNet-18 on one rank by 4e-3 in float32, and
# by 1e-14 in float64.
_BATCH_NORM_TOLERANCE = 0.02
SMALL_FRACTION = 0.1  # A sampler may repeat or omit this fraction of the samples to give all ranks equally many.

_WRAP_ADVICE = (
    "Each rank trains its own network on its share of the samples. Wrap it, model = DistributedDataParallel(network), "
    "and call model(inputs) to train, not network or model.module. Otherwise, average the gradients over all ranks "
    "before each step"
)


def compare_networks(whole: CheckOutcome, alone: CheckOutcome | None) -> Finding | None:
    """Return a finding if the networks of the ranks differ; None if they are equal or cannot be compared.

    Ranks that hold only parts of the network cannot be compared. Their shapes differ from the shapes in `alone`. Some
    programs average weights only at some steps. So networks differ only if they differ at the final step that was
    recorded on both ranks.
    """
    first, *others = whole.traces
    if whole.failure and "different losses" not in whole.failure:
        return None
    shapes = _get_shapes(first)
    if first.sharded or any(_get_shapes(other) != shapes for other in others):
        return None
    # A cancelled program is cut off at a different step on each rank.
    if any(other.steps != first.steps for other in others) and not any(trace.was_cut for trace in whole.traces):
        steps = ", ".join(f"rank {rank} {trace.steps}" for rank, trace in enumerate(whole.traces))
        return Finding(
            "wrong",
            f"The ranks take different numbers of steps: {steps}",
            "Give all ranks the same number of batches: use DistributedSampler, or batch[worker.rank :: worker.size]",
        )
    if alone is not None and _get_shapes(alone.traces[0]) not in ([], shapes):
        return None
    for rank, other in enumerate(others, start=1):
        if (steps_apart := _find_difference(first, other)) is not None:
            when = f"after {format_count(steps_apart, 'step')}" if steps_apart else "before the first step"
            return Finding("wrong", f"The networks of rank 0 and rank {rank} differ {when}", _WRAP_ADVICE)
    return None


def _get_shapes(seen: Trace) -> list[tuple[int, ...]]:
    """Return the shapes of the parameters of a rank's networks; without networks, those of its optimizers."""
    return seen.network_shapes if seen.networks else seen.shapes


def _find_difference(one: Trace, other: Trace) -> int | None:
    """Return the first step at which a network differs between two ranks; None if it is equal at the final step."""
    mine, others = _get_networks(one), _get_networks(other)
    found = []
    for number in {key[0] for key in mine}:
        common = sorted(key for key in mine.keys() & others.keys() if key[0] == number)
        apart = [key for key in common if is_different(mine[key], others[key])]
        if apart and apart[-1] == common[-1]:
            found.append(apart[0][1])
    return min(found, default=None)


def count_equal_steps(whole: CheckOutcome) -> int:
    """Return the largest number of steps after which the networks of all ranks were equal; 0 if they never were."""
    first, *others = (_get_networks(seen) for seen in whole.traces)
    common = [key for key in first if all(key in other for other in others)]
    return max((key[1] for key in common if not any(is_different(first[key], one[key]) for one in others)), default=0)


def _get_networks(seen: Trace) -> Mapping[tuple[int, int, bool], Fingerprint]:
    """Return the fingerprints of a rank's networks; without networks, those of its optimizers' parameters."""
    return seen.networks or {(number, 0, True): weights for number, weights in seen.weights.items()}


def compare_training(whole: CheckOutcome, alone: CheckOutcome) -> Iterator[Finding]:
    """Yield findings about the first of these that differs, in this order: samples, steps per epoch, gradients."""
    many = whole.traces[0]
    samples = list(_compare_samples(whole, alone))
    if samples:
        yield from samples
    elif (ours := _count_epoch_steps(whole)) and (theirs := _count_epoch_steps(alone)) and ours != theirs:
        what = "An epoch has" if many.steps_at_losses else "It takes"
        yield Finding(
            "look",
            f"{what} {format_count(ours, 'step')} on {format_count(whole.ranks, 'rank')} and {theirs} on 1: the "
            f"global batch size differs",
            "If batch_size is the global batch size, a rank takes batch_size // worker.size. Otherwise, the best "
            "learning rate depends on the number of ranks",
        )
    elif has_same_parameters(whole, alone) and not (many.random_layers or many.normalization_layers.total()):
        yield from _compare_gradients(whole, alone)


def _compare_samples(whole: CheckOutcome, alone: CheckOutcome) -> Iterator[Finding]:
    """Yield a finding unless each rank trains on a different share of the samples.

    In the first epoch, the shares together must be the samples of the first epoch on 1 rank.
    """
    if not has_samples(whole, alone) or not _has_same_networks(whole, alone):
        return
    ours, theirs = _count_samples(alone), _count_samples(whole)
    if not ours or not theirs:
        return
    found, ranks = ours.keys() & theirs.keys(), format_count(whole.ranks, "rank")
    if has_same_batches(whole):
        yield Finding(
            "wrong",
            f"Each of {ranks} trains on the same batches",
            f"{ranks} then do the work of 1. Let each rank take its share: use DistributedSampler, "
            "batch[worker.rank :: worker.size], or another seed for the batches of each rank",
        )
    elif sum(theirs[hash_] for hash_ in found) < (1 - SMALL_FRACTION / 10) * theirs.total() or _is_randomly_sampled(
        alone
    ):
        yield Finding(
            "look",
            "The samples differ from those on 1 rank: each rank draws its batches, or changes its samples, at random. "
            "So gradients and losses cannot be compared",
            "To find other differences, check once without augmentation, and with shares of equal batches",
        )
    elif len(found) < (1 - SMALL_FRACTION) * len(ours):
        yield Finding(
            "wrong",
            f"Of the {len(ours)} samples of 1 rank's first epoch, {ranks} train on {len(found)}"
            f"{', and on some of them more than once' if theirs.total() > len(found) else ''}",
            "The order of the samples must be the same on all ranks. Use torch.randperm with a Generator, "
            "torch.Generator().manual_seed(worker.seed + epoch)",
        )
    elif all(len(_take_first_samples(seen, len(ours))) >= (1 - SMALL_FRACTION) * len(ours) for seen in whole.traces):
        yield Finding(
            "look",
            f"Each of {ranks} trains on all {len(ours)} samples, as 1 rank does",
            "More ranks are then not faster. Let each rank take its share, batch[worker.rank :: worker.size]",
        )


def has_samples(whole: CheckOutcome, alone: CheckOutcome) -> bool:
    """Return whether samples were recorded on all ranks, in both evaluations."""
    return all(any(hashes for _, hashes in seen.samples) for seen in [*whole.traces, *alone.traces])


def _count_samples(outcome: CheckOutcome) -> Counter[bytes]:
    """Count how often each sample occurs in the first epoch on all ranks together. The keys are hashes of samples."""
    limit = min([_count_epoch_steps(outcome) or outcome.traces[0].steps, *(trace.steps for trace in outcome.traces)])
    batches = [hashes for trace in outcome.traces for steps, hashes in trace.samples if steps < limit]
    return Counter(chain.from_iterable(batches))


def _take_first_samples(seen: Trace, count: int) -> set[bytes]:
    """Return the distinct samples among the first `count` samples of a rank."""
    return set(islice(chain.from_iterable(hashes for _, hashes in seen.samples), count))


def _is_randomly_sampled(alone: CheckOutcome) -> bool:
    """Return whether samples are drawn with replacement, so that some are repeated before all have occurred."""
    count = len(_count_samples(alone))
    return len(_take_first_samples(alone.traces[0], count)) < (1 - SMALL_FRACTION) * count


def has_same_batches(whole: CheckOutcome) -> bool:
    """Return whether most batches are the same on all ranks; False if rank 0 has only one distinct batch."""
    same, count = count_same_batches(whole)
    return same > count / 2 and len({tuple(hashes) for _, hashes in whole.traces[0].samples}) > 1


def count_same_batches(whole: CheckOutcome) -> tuple[int, int]:
    """Return the number of batches that are the same on all ranks, and the number of batches that were compared."""
    batches = list(zip(*(seen.samples for seen in whole.traces), strict=False))
    return sum(bool(first[1]) and all(other == first for other in others) for first, *others in batches), len(batches)


def _compare_gradients(whole: CheckOutcome, alone: CheckOutcome) -> Iterator[Finding]:
    """Yield a finding if the gradients of the first step differ between ranks, or from those on 1 rank.

    A difference from 1 rank is "wrong" if the step has the same samples on both. It is also "wrong" if the gradients
    differ by a factor that is the number of ranks or its inverse. All other differences are "look".
    """
    many = whole.traces[0]
    if any(is_different(many.gradients[0], other.gradients.get(0, ())) for other in whole.traces[1:]):
        yield Finding(
            "look",
            "The ranks average their weights, not their gradients",
            "Losses then depend on the number of ranks. DistributedDataParallel averages gradients",
        )
        return
    ours, theirs = many.gradients[0], alone.traces[0].gradients[0]
    off = compute_distance(ours, theirs)
    if not off > (_BATCH_NORM_TOLERANCE if many.synchronized_layers else TOLERANCE):
        return
    ratio = compute_norm(ours) / compute_norm(theirs) if compute_norm(theirs) else math.nan
    if any(math.isclose(ratio, factor, rel_tol=TOLERANCE) for factor in (whole.ranks, 1 / whole.ranks)):
        yield Finding(
            "wrong",
            f"The gradients of the first step are {ratio:.3g} times those of 1 rank",
            "DistributedDataParallel averages over ranks. If each rank divides the sum of its losses by the global "
            "batch size, multiply by worker.size: (loss * worker.size / len(batch)).backward()",
        )
        return
    is_same = has_samples(whole, alone) and _count_first_step_samples(whole) == _count_first_step_samples(alone)
    state: Literal["look", "wrong"] = "wrong" if is_same else "look"
    yield Finding(
        state,
        f"The gradients of the first step are {format_relative(off)} off those of 1 rank"
        f"{'' if is_same else ', but the samples differ, or are not known'}",
        "If the ranks' shares of a batch differ in size, use reduction='sum' and "
        "(loss * worker.size / len(batch)).backward()",
    )


def _count_first_step_samples(outcome: CheckOutcome) -> Counter[bytes]:
    """Count how often each sample occurs in the first step on all ranks together. The keys are hashes of samples."""
    batches = [hashes for trace in outcome.traces for steps, hashes in trace.samples if steps == 0]
    return Counter(chain.from_iterable(batches))


def has_same_parameters(whole: CheckOutcome, alone: CheckOutcome) -> bool:
    """Return whether the optimizers' parameters have the same shapes on all ranks as on 1 rank, and are not sharded."""
    shapes = alone.traces[0].shapes
    return bool(shapes) and not any(one.sharded or one.shapes != shapes for one in [*whole.traces, *alone.traces])


def _has_same_networks(whole: CheckOutcome, alone: CheckOutcome) -> bool:
    """Return whether the networks' parameters have the same shapes on all ranks as on 1 rank, and are not sharded."""
    shapes = _get_shapes(alone.traces[0])
    return bool(shapes) and not any(one.sharded or _get_shapes(one) != shapes for one in [*whole.traces, *alone.traces])


def _count_epoch_steps(outcome: CheckOutcome) -> int | None:
    """Return the number of steps in the first epoch; None if it is unknown.

    A program does not record its steps at losses. For a program, the result is the number of steps until the final
    loss, or until the end of the program.
    """
    seen, losses = outcome.traces[0], len(outcome.losses)
    if seen.steps_at_losses:
        return next((steps for steps in seen.steps_at_losses if steps), seen.steps)
    validated = sorted({steps for _, steps, trains in seen.networks if not trains})
    if 0 < losses <= len(validated):
        return validated[losses - 1]
    return None if any(one.was_cut for one in outcome.traces) else seen.steps


def is_different(one: Fingerprint, other: Fingerprint) -> bool:
    """Return whether two fingerprints differ by more than rounding. Then the weights or gradients differ, too."""
    return len(one) != len(other) or not compute_distance(one, other) <= _FINGERPRINT_TOLERANCE


def format_relative(off: float) -> str:
    """Return a relative difference as text."""
    return f"{off:.1%}" if off >= 0.001 else f"{off:.0e}"
