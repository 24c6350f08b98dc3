"""Compare the losses of two evaluations of one individual: repeated, resumed, or on 1 rank.

In this module, `whole` is an evaluation on all ranks, and `alone` is an evaluation on 1 rank.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from hpo.check.check_evaluator import CheckOutcome
from hpo.check.finding import Finding
from hpo.check.training_comparison import (
    SMALL_FRACTION,
    TOLERANCE,
    compare_networks,
    compare_training,
    format_relative,
    has_same_parameters,
    has_samples,
    is_different,
)
from hpo.process.trace import Trace, compute_distance
from hpo.text_format import format_count


def compare_repetition(first: CheckOutcome, again: CheckOutcome) -> Finding:
    """Return a finding about whether two evaluations with the same seed and number of ranks have the same losses."""
    text = f"The same seed on {format_count(first.ranks, 'rank')}"
    if first.traces[0].steps and not again.traces[0].steps:
        return Finding(
            "look",
            f"{text}: the second evaluation took no step, so nothing was compared",
            "It may have resumed from a checkpoint of the first. Delete it: a search would resume from it, too",
        )
    off = _compute_difference(first.losses, again.losses)
    if off <= TOLERANCE:
        return Finding("ok", f"{text} has the same losses twice{_format_within(off)}")
    begin, began = first.traces[0].weights.get(0), again.traces[0].weights.get(0)
    if begin and began and is_different(begin, began):
        return Finding(
            "wrong",
            f"{text} has different losses the second time, {format_relative(off)} off: the initial weights differ",
            "Create the network and its weights in the objective. Objects at module level keep their state between "
            "evaluations",
        )
    return Finding(
        "look",
        f"{text} has different losses the second time, {format_relative(off)} off, from the same initial weights",
        "Possible causes: random numbers without worker.seed (loader processes, a Generator, the clock), a counter of "
        "evaluations, or nondeterministic GPU kernels (find them with torch.use_deterministic_algorithms(True))",
    )


def compare_continuation(whole: CheckOutcome, went_on: CheckOutcome) -> Finding:
    """Return a finding about whether a resumed evaluation has the losses of an uninterrupted one."""
    if len(whole.losses) == 1:
        return Finding("look", "The only checkpoint belongs to the only loss", "Set epochs=2 to check that it resumes")
    off = _compute_difference(whole.losses, went_on.losses)
    if off <= TOLERANCE and len(whole.losses) == len(went_on.losses):
        return Finding("ok", f"After a resume from the first checkpoint, the losses are the same{_format_within(off)}")
    found = f"{format_relative(off)} off" if off > TOLERANCE else f"{len(went_on.losses)} for {len(whole.losses)}"
    return Finding(
        "wrong",
        f"After a resume from the first checkpoint, the losses differ, {found}",
        "Save all that training changes, before the loss: optimizer, scheduler, random generators, number of epochs. "
        "Seed random numbers of an epoch by its index",
    )


def compare_rank_counts(whole: CheckOutcome, alone: CheckOutcome) -> Iterator[Finding]:
    """Yield a finding about whether all ranks and 1 rank have the same losses, and findings about likely causes.

    Different losses are "wrong" only if no cause is found and the samples were recorded. Otherwise they are "look". A
    cause of different losses is "wrong" if it is certainly a mistake. If the losses are equal, each cause is "look".
    """
    ranks, off = format_count(whole.ranks, "rank"), _compute_difference(whole.losses, alone.losses)
    if len(whole.losses) != len(alone.losses):
        text = f"There are {format_count(len(whole.losses), 'loss')[:-1]}es on {ranks}, and {len(alone.losses)} on 1"
        yield Finding("look", text, "The number of epochs should not depend on the number of ranks")
    if off <= TOLERANCE:
        yield Finding("ok", f"{ranks} and 1 rank have the same losses{_format_within(off)}")
        yield from (Finding("look", cause.text, cause.advice) for cause in compare_training(whole, alone))
        return
    text = f"The losses of {ranks} and of 1 rank are {format_relative(off)} off"
    is_apart = compare_networks(whole, alone) is not None
    causes = [] if is_apart else list(_find_causes(whole, alone))
    if causes or is_apart:
        yield Finding("look", text)
        yield from causes
    else:
        yield Finding("wrong" if has_samples(whole, alone) else "look", text, _advise_unexplained(whole, alone))


def _find_causes(whole: CheckOutcome, alone: CheckOutcome) -> Iterator[Finding]:
    """Yield causes of different losses on all ranks and on 1 rank: one certain cause, or all possible causes."""
    ratios = [ours / theirs for ours, theirs in zip(whole.losses, alone.losses, strict=False) if theirs]
    layers = list(_find_rank_dependent_layers(whole.traces[0]))
    for factor in (whole.ranks, 1 / whole.ranks):
        if all(
            math.isclose(ratio, factor, rel_tol=SMALL_FRACTION if layers else SMALL_FRACTION / 10) for ratio in ratios
        ):
            yield Finding(
                "wrong",
                f"The losses are {factor:.3g} times those of 1 rank",
                "Divide the sum over all ranks by the number of all validation samples. Their mean of means is "
                "right only if their shares are equally large",
            )
            return
    if has_same_parameters(whole, alone) and is_different(whole.traces[0].weights[0], alone.traces[0].weights[0]):
        yield Finding(
            "look",
            "The initial weights differ from those on 1 rank",
            "Create the network before anything that depends on the rank or on the number of ranks",
        )
        return
    training = list(compare_training(whole, alone))
    yield from training
    if all(cause.level == "look" for cause in training):
        yield from layers
        if not training and not layers:
            yield from _find_shared_norms(whole.traces[0])


def _advise_unexplained(whole: CheckOutcome, alone: CheckOutcome) -> str:
    ours, theirs = whole.traces[0].at_loss[:1], alone.traces[0].at_loss[:1]
    if has_same_parameters(whole, alone) and ours and theirs and ours[0] and len(ours[0]) == len(theirs[0]):
        if compute_distance(ours[0], theirs[0]) <= TOLERANCE:
            return (
                "The networks are the same at the first loss, so the validation differs. The loss must include each "
                "sample once: divide the sum over all ranks by the number of all samples"
            )
        return (
            "The gradients of the first step are the same, but the networks differ at the first loss. If the ranks' "
            "shares of the last batch differ in size, use reduction='sum' and "
            "(loss * worker.size / len(batch)).backward()"
        )
    return (
        "No cause was found. Divide the validation loss, summed over all ranks, by the number of all samples. Weight "
        "the ranks' shares of a batch by their sizes"
    )


def _find_rank_dependent_layers(seen: Trace) -> Iterator[Finding]:
    if seen.normalization_layers.total():
        yield Finding(
            "look",
            f"{_format_layer_counts(seen.normalization_layers)}: each rank normalizes with its own share of a batch",
            "nn.SyncBatchNorm.convert_sync_batchnorm(network) on GPUs, GroupNorm and LayerNorm do not depend on the "
            "number of ranks",
        )
    if seen.random_layers:
        yield Finding(
            "look",
            f"{_format_layer_counts(seen.random_layers)}: each rank draws random numbers for its own share, so "
            f"losses differ a little",
            "To find other differences, check once with a probability of 0, or without random numbers",
        )


def _find_shared_norms(seen: Trace) -> Iterator[Finding]:
    if seen.synchronized_layers.total():
        yield Finding(
            "look",
            f"{_format_layer_counts(seen.synchronized_layers)}: they normalize over all ranks, and rounding "
            f"errors grow from step to step",
            "To find other differences, check once with fewer steps and a lower learning rate",
        )


def _compute_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the largest relative difference between two losses of the same epoch."""
    pairs = list(zip(ours, theirs, strict=False))
    return max((abs(a - b) / max(abs(a), abs(b)) for a, b in pairs if a != b), default=0.0)


def _format_within(off: float) -> str:
    return f", within {off:.0e}" if off else ", to the last digit"


def _format_layer_counts(layers: Counter[str]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in layers.items() if count)
