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
            f"{text}: the second evaluation took no step, so that nothing was compared",
            "It seems to go on from a checkpoint of the first: delete it, since a search would go on from it too",
        )
    off = _compute_difference(first.losses, again.losses)
    if off <= TOLERANCE:
        return Finding("ok", f"{text} has the same losses twice{_format_within(off)}")
    begin, began = first.traces[0].weights.get(0), again.traces[0].weights.get(0)
    if begin and began and is_different(begin, began):
        return Finding(
            "wrong",
            f"{text} has other losses the second time, {format_relative(off)} off: the network begins with other "
            f"weights",
            "Make the network in the objective, and draw its weights there: what is kept outside of it, in the module, "
            "goes on from evaluation to evaluation",
        )
    return Finding(
        "look",
        f"{text} has other losses the second time, {format_relative(off)} off, from the same first weights",
        "Something draws without worker.seed: loader processes, a Generator, the clock; or it counts evaluations; or "
        "kernels of a GPU add in another order each time, which torch.use_deterministic_algorithms(True) shows",
    )


def compare_continuation(whole: CheckOutcome, went_on: CheckOutcome) -> Finding:
    """Return a finding about whether a resumed evaluation has the losses of an uninterrupted one."""
    if len(whole.losses) == 1:
        return Finding("look", "It saves its state with its only loss", "Two losses show whether it goes on: epochs=2")
    off = _compute_difference(whole.losses, went_on.losses)
    if off <= TOLERANCE and len(whole.losses) == len(went_on.losses):
        return Finding(
            "ok", f"It goes on from what it has saved with its first loss: the same losses{_format_within(off)}"
        )
    found = f"{format_relative(off)} off" if off > TOLERANCE else f"{len(went_on.losses)} for {len(whole.losses)}"
    return Finding(
        "wrong",
        f"It goes on from what it has saved with its first loss with other losses, {found}",
        "Whatever changes while training belongs into the saved state, before the loss: the optimizer, the schedule, "
        "generators, the number of epochs; what is drawn anew in each epoch begins at a seed of its own",
    )


def compare_rank_counts(whole: CheckOutcome, alone: CheckOutcome) -> Iterator[Finding]:
    """Yield a finding about whether all ranks and 1 rank have the same losses, and findings about likely causes.

    Different losses are "wrong" only if no cause is found and the samples were recorded. Otherwise they are "look". A
    cause of different losses is "wrong" if it is certainly a mistake. If the losses are equal, each cause is "look".
    """
    ranks, off = format_count(whole.ranks, "rank"), _compute_difference(whole.losses, alone.losses)
    if len(whole.losses) != len(alone.losses):
        text = f"There are {format_count(len(whole.losses), 'loss')[:-1]}es on {ranks}, and {len(alone.losses)} on 1"
        yield Finding("look", text, "Should the number of epochs depend on the number of ranks?")
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
                f"They are {factor:.3g} times those of 1 rank",
                "Divide the sum over all ranks by the number of all validation samples, or take the mean of all ranks' "
                "means only where their shares are equally large",
            )
            return
    if has_same_parameters(whole, alone) and is_different(whole.traces[0].weights[0], alone.traces[0].weights[0]):
        yield Finding(
            "look",
            "The network begins with other weights on 1 rank",
            "Draw the weights before anything that depends on the rank, or on the number of ranks",
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


def _find_rank_dependent_layers(seen: Trace) -> Iterator[Finding]:
    if seen.normalization_layers.total():
        yield Finding(
            "look",
            f"{_format_layer_counts(seen.normalization_layers)}: each rank normalises by its own share of a batch",
            "nn.SyncBatchNorm.convert_sync_batchnorm(network) on GPUs, or GroupNorm or LayerNorm, does not depend on "
            "the number of ranks",
        )
    if seen.random_layers:
        yield Finding(
            "look",
            f"{_format_layer_counts(seen.random_layers)}: each rank draws for its own share, so that losses differ "
            f"a little",
            "To see whether anything else differs, check once with a probability of 0, or without random numbers",
        )


def _find_shared_norms(seen: Trace) -> Iterator[Finding]:
    if seen.synchronized_layers.total():
        yield Finding(
            "look",
            f"{_format_layer_counts(seen.synchronized_layers)}: normalised by all ranks' samples, which lets "
            f"rounding grow from step to step",
            "To see whether anything else differs, check once with fewer steps, and a lower learning rate",
        )


def _compute_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the largest relative difference between two losses of the same epoch."""
    pairs = list(zip(ours, theirs, strict=False))
    return max((abs(a - b) / max(abs(a), abs(b)) for a, b in pairs if a != b), default=0.0)


def _format_within(off: float) -> str:
    return f", within {off:.0e}" if off else ", to the last digit"


def _format_layer_counts(layers: Counter[str]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in layers.items() if count)
