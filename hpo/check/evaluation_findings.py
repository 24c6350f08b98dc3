"""Make the findings of `hpo check` from its evaluations: a probe looks for one kind of mistake.

In this module, `whole` is an evaluation on all ranks, and `alone` is the evaluation on 1 rank.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

from hpo.check.check_evaluator import CheckOutcome, FileSnapshot, WeightsTest
from hpo.check.finding import Finding, look, ok, wrong
from hpo.process.trace import Fingerprint, Trace, compute_distance, compute_norm
from hpo.script_objective import Script
from hpo.text_format import (
    cut_text,
    format_count,
    format_duration,
    format_list,
    format_named_values,
)

# Relative tolerances. Ranks that average their gradients have equal weights to the last bit. For
# the same training on 1 and on 2 or 3 ranks, losses differed by 1e-7 after three epochs (float32,
# Adam and Adadelta on digits), and first gradients by 3e-7.
_FINGERPRINT_TOLERANCE = 1e-9
_TOLERANCE = 1e-4
# Another order of the samples in a batch changed the first gradients of ResNet-18 on one rank by
# 4e-3 in float32, and by 1e-14 in float64.
_BATCH_NORM_TOLERANCE = 0.02
# A sampler may repeat or omit this fraction of the samples to give all ranks equally many.
_SMALL_FRACTION = 0.1

_MAX_FAILURE_LENGTH = 400  # characters that are printed

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_TORCHRUN_VARIABLES = (
    *_RANK_VARIABLES,
    *("LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT"),
)

# The first pattern that matches the failure or the traceback determines the advice.
_ADVICE_BY_PATTERN = {
    r"the ranks yielded different losses": (
        "A rank yields the loss of its own share or of its own network. Add up the sums over all "
        "ranks, dist.all_reduce(total), and divide by the number of all samples"
    ),
    r"DataLoader worker .* exited unexpectedly": (
        "Loader processes that are not forked cannot import the search file (No module named "
        "'search_file_...'). Leave multiprocessing_context out, or put the Dataset into a module "
        "next to the file"
    ),
    r"Expected to have finished reduction": (
        "Some parameters had no part in the loss{unused}. Freeze them by requires_grad_(False) "
        "before DistributedDataParallel wraps the network, or pass find_unused_parameters=True"
    ),
    r"do not yield equally many losses|timeout: .*( at its end for rank|, which had ended)": (
        "The ranks must train the same number of epochs. Base early stopping on a value that is "
        "equal on all ranks, such as an all-reduced loss"
    ),
    r"the ranks are in different collectives|timeout: ": (
        "The ranks of a worker must call the same collectives (all_reduce, a backward pass of "
        "DistributedDataParallel, a yield) equally often. Look for different numbers of steps, and "
        "for calls inside if worker.rank == 0"
    ),
    r"the objective yielded no loss": (
        "Yield the validation loss after each epoch; a function without any yield may return it"
    ),
    r"an objective must yield its validation loss, a number, got None": (
        "Every rank must yield the loss. If only one rank computes it, send it to the others by "
        "dist.broadcast"
    ),
    r"FileNotFoundError: .*a relative path": (
        "Make the path a setting, --set data=/path/to/it, or use an absolute path"
    ),
    r"the validation loss is (nan|-?inf)": (
        "This is normal for some hyperparameters. If these should be good, check the data and the "
        "loss, and narrow the learning rate. --enqueue FILE checks another individual"
    ),
}


# A program has no `worker`.
_CALLS_OF_PROGRAMS = {
    "worker.rank": "dist.get_rank()",
    "worker.size": "dist.get_world_size()",
    "worker.seed": "args.seed",
}
_NETWORK_IN_OBJECTIVE = (
    "Create the network and its weights in the objective. Objects at module level keep their state "
    "between evaluations"
)
_RANKS = (
    "If an option names the number of ranks, such as --devices 2, give it as --devices {ranks}, "
    "and check again"
)
_SEED_OF_PROGRAM = (
    "Seed the program, for example by torch.manual_seed(args.seed), and pass --seed {seed}. If it "
    "is seeded, it may have read a file of the first evaluation"
)


@dataclass(frozen=True)
class CheckOutcomes:
    """All that a check has found out; None for an evaluation that was left out."""

    whole: CheckOutcome
    again: CheckOutcome | None
    """The second evaluation on all ranks; none after a failure of the first."""
    resumed: CheckOutcome | None
    """The evaluation on all ranks that resumed from the checkpoint of the first loss."""
    alone: CheckOutcome | None
    paused: CheckOutcome | None = None
    """The evaluation that `resumed` continues, of a program that writes its own files."""
    branches: Sequence[CheckOutcome] = ()
    """Evaluations on all ranks with other choices, on which further hyperparameters depend."""
    weights_test: WeightsTest | None = None
    script: Script | None = None
    """The program that is the objective; None if it is a function."""
    files: Sequence[FileSnapshot] = ()
    """Of a program: the working directory before the first evaluation, and after each."""

    def list_compared(self) -> list[CheckOutcome]:
        """Return the outcomes of the evaluations that have started from the beginning."""
        return [outcome for outcome in (self.whole, self.again, self.alone) if outcome is not None]


def inspect_outcomes(outcomes: CheckOutcomes) -> list[Finding]:
    """Return the findings of all probes. For a program, the advice names what it can call."""
    findings = [finding for probe in PROBES for finding in probe(outcomes)]
    if outcomes.script is None:
        return findings
    return [replace(finding, advice=_translate_advice(finding.advice)) for finding in findings]


def _translate_advice(advice: str) -> str:
    for name, call in _CALLS_OF_PROGRAMS.items():
        advice = advice.replace(name, call)
    return advice


def find_failure(outcomes: CheckOutcomes) -> Iterator[Finding]:
    """Look for a failure of an evaluation from the beginning."""
    whole = outcomes.whole
    alone = outcomes.alone
    if whole.failure:
        others = "" if alone is None else " and on 1" if alone.failure else ", but not on 1"
        yield _describe_failure(
            whole, f"The evaluation fails on {format_count(whole.ranks, 'rank')}{others}"
        )
        if alone is not None and _has_other_reason(alone, whole):
            yield replace(
                _describe_failure(alone, "On 1 rank, the reason is another"), level="look"
            )
    elif alone is not None and alone.failure and not (outcomes.again and outcomes.again.failure):
        finding = _describe_failure(alone, "The evaluation fails on 1 rank only")
        if outcomes.script is not None:
            finding = replace(finding, level="look", advice=finding.advice or _RANKS)
        yield finding


def inspect_branches(outcomes: CheckOutcomes) -> Iterator[Finding]:
    """Look for failures in other branches of a space with conditional hyperparameters."""
    failed = [outcome for outcome in outcomes.branches if outcome.failure]
    for outcome in failed:
        values = format_named_values(outcome.evaluation.params)
        yield _describe_failure(outcome, f"The evaluation fails with {values}")
    if outcomes.branches and not failed:
        number = format_count(len(outcomes.branches), "individual")
        yield ok(f"{number} of other branches of the space can be evaluated")


def _has_other_reason(alone: CheckOutcome, whole: CheckOutcome) -> bool:
    """Return whether 1 rank has failed for another reason, apart from ranks and numbers."""
    reasons = [re.sub(r"^rank \d+|\d+", "", outcome.failure) for outcome in (alone, whole)]
    return bool(alone.failure) and reasons[0] != reasons[1]


def find_different_networks(outcomes: CheckOutcomes) -> Iterator[Finding]:
    """Look for ranks whose networks differ, or that take different numbers of steps."""
    difference = _compare_networks(outcomes.whole, outcomes.alone)
    if difference and not _trains_alone(outcomes):  # Otherwise that is the cause.
        yield difference


def compare_repetition(outcomes: CheckOutcomes) -> Iterator[Finding]:
    """Look for losses that differ although the seed and the number of ranks are the same."""
    again = outcomes.again
    if again is not None and again.failure:
        yield _describe_failure(again, "The second evaluation fails")
    elif again is not None:
        yield _compare_repetition(outcomes)


def compare_rank_counts(outcomes: CheckOutcomes) -> Iterator[Finding]:
    """Look for losses that depend on the number of ranks.

    Options of a program may name the number of ranks, so that it does not train right on one. Then
    a difference from 1 rank is "look". That all ranks have the same batches needs no comparison.
    """
    findings = list(_compare_rank_counts(outcomes))
    is_doubtful = outcomes.script is not None and not _has_same_batches(outcomes.whole)
    if not is_doubtful or all(finding.level != "wrong" for finding in findings):
        yield from findings
        return
    yield from (replace(f, level="look") if f.level == "wrong" else f for f in findings)
    yield look("The options of the program may name the number of ranks", _RANKS)


def _compare_rank_counts(outcomes: CheckOutcomes) -> Iterator[Finding]:
    """Look for losses that depend on the number of ranks, and for likely causes.

    Different losses are "wrong" only if no cause is found and the samples were recorded. Otherwise
    they are "look". A cause of different losses is "wrong" if it is certainly a mistake. If the
    losses are equal, each cause is "look".
    """
    whole = outcomes.whole
    alone = outcomes.alone
    if outcomes.again is None or outcomes.again.failure:
        return
    if alone is None:
        yield look("Only 1 rank was checked", "Compare numbers of ranks with mpirun -n 2 hpo check")
        return
    if alone.failure or _compare_repetition(outcomes).level != "ok":
        return
    ranks = format_count(whole.ranks, "rank")
    off = _compute_difference(whole.losses, alone.losses)
    if len(whole.losses) != len(alone.losses):
        losses = f"{format_count(len(whole.losses), 'loss')[:-1]}es"
        text = f"There are {losses} on {ranks}, and {len(alone.losses)} on 1"
        yield look(text, "The number of epochs should not depend on the number of ranks")
    if off <= _TOLERANCE:
        yield ok(f"{ranks} and 1 rank have the same losses{_format_within(off)}")
        for cause in _compare_training(whole, alone):
            yield replace(cause, level="look")
        return
    text = f"The losses of {ranks} and of 1 rank differ by {_format_relative(off)}"
    if _compare_networks(whole, alone) is not None:
        yield look(text)  # The finding about the networks is the cause.
    elif causes := list(_find_causes(whole, alone)):
        yield look(text)
        yield from causes
    else:
        make = wrong if _has_samples(whole, alone) else look
        yield make(text, _advise_unexplained(whole, alone))


def find_unused_parameters(outcomes: CheckOutcomes) -> Iterator[Finding]:
    """Look for parameters of an optimizer that never have a gradient."""
    compared = outcomes.list_compared()
    if not any(outcome.traces[0].shapes for outcome in compared):
        if not any(outcome.failure for outcome in compared):
            yield look(
                "No optimizer of torch took a step",
                "Gradients, steps and weights were not checked",
            )
        return
    if outcomes.whole.failure:
        return
    if missing := _list_unused_parameters(outcomes.whole):
        yield look(
            f"{format_count(len(missing), 'parameter')} of the optimizer never had a gradient: "
            f"{format_list(missing)}",
            "They never change. If this is intended, freeze them by requires_grad_(False), and "
            "leave them out",
        )
    else:
        yield ok("All parameters of the optimizer had gradients")


def inspect_weights(outcomes: CheckOutcomes) -> Iterator[Finding]:
    """Look for weights that are not offered, or that the network or `test` cannot load."""
    weights_test = outcomes.weights_test
    if weights_test is None or outcomes.whole.failure or outcomes.script is not None:
        return
    if not outcomes.whole.has_offered_weights:
        text = "No weights are offered, so the run cannot keep those of the best network"
        yield Finding(
            "wrong" if weights_test.has_test else "look",
            f"{text}, and `test` will not be called" if weights_test.has_test else text,
            "Call worker.offer_weights(network.state_dict()) before each yield, at least on rank 0",
        )
        return
    names = weights_test.weight_names
    if names is None:
        yield wrong("The offered weights could not be kept")
        return
    if prefixed := [name for name in names if name.startswith("module.")]:
        yield wrong(
            f"The names of the offered weights begin with module.: {format_list(prefixed)}",
            "The network itself cannot load them. Call "
            "worker.offer_weights(model.module.state_dict())",
        )
    else:
        yield ok(f"The offered weights have {format_count(len(names), 'tensor')}")
    if weights_test.failure:
        yield wrong(
            f"`test` fails with the offered weights: {weights_test.failure}",
            "A run would end without a result on test data",
        )
    elif weights_test.seconds is not None:
        seconds = format_duration(weights_test.seconds)
        yield ok(f"`test` accepts the offered weights, and takes {seconds}")
    else:
        yield ok("There is no `test`. It is optional")


@dataclass(frozen=True)
class _ResumeTexts:
    """What to say about an evaluation that does not resume."""

    restarts: str
    must_resume: str
    must_load: str


_CALLS = _ResumeTexts(
    "The evaluation saves checkpoints, but restarts instead of resuming from them",
    "At the start, load worker.checkpoint (hpo.checkpoint in a script), and train the remaining "
    "epochs",
    "worker.checkpoint (hpo.checkpoint in a script) is the state that was saved. A new network and "
    "optimizer with the same hyperparameters must be able to load it",
)
_OWN_FILES = _ResumeTexts(
    "There is no checkpoint in {folder} after the first loss, so it restarts",
    "--resume-file (or the file in --resume-args) must be a file that the program writes before "
    "each report, or soon after. If it writes one less often, give --step",
    "With --resume-args, the program must load what it has saved in {folder}",
)


def inspect_checkpoints(outcomes: CheckOutcomes) -> Iterator[Finding]:
    """Look for an evaluation that does not resume from its checkpoint as if uninterrupted."""
    again = outcomes.again
    resumed = outcomes.resumed
    if again is None or again.failure:
        return
    if resumed is None:
        if outcomes.script is None:
            yield ok(
                "No checkpoint is saved. It is optional: without one, an interrupted evaluation "
                "restarts",
            )
        return
    texts = _CALLS if outcomes.paused is None else _OWN_FILES
    if failure := resumed.rejection or resumed.failure:
        yield wrong(
            "The evaluation cannot resume from its checkpoint: "
            f"{cut_text(failure, _MAX_FAILURE_LENGTH)}",
            texts.must_load,
        )
        return
    if not resumed.evaluation.resumed_from_step:
        # With --step, a program may write checkpoints less often than it reports losses.
        has_step = outcomes.script is not None and outcomes.script.step is not None
        yield (look if has_step else wrong)(texts.restarts, texts.must_resume)
        return
    if _compare_repetition(outcomes).level != "ok":
        return
    if len(again.losses) == 1:
        yield look(
            "The only checkpoint belongs to the only loss",
            "Set epochs=2 to check that it resumes",
        )
    elif outcomes.paused is not None and outcomes.paused.reports > 2:
        yield look(
            f"The program had reported {outcomes.paused.reports} losses before it was stopped, so "
            "the losses after a resume were not compared",
            "Give it longer epochs to check that it resumes",
        )
    else:
        finding = _compare_resumed_losses(again, resumed)
        has_step = outcomes.script is not None and outcomes.script.step is not None
        is_late = has_step and resumed.evaluation.epoch is None
        yield _allow_for_late_reports(finding) if is_late else finding


def _allow_for_late_reports(finding: Finding) -> Finding:
    """Return a finding about a resumed program whose ``--step`` finds no numbers of epochs.

    Its losses are reported late.
    """
    if finding.level != "wrong":
        return finding
    return look(
        finding.text,
        "With --step, the loss of an epoch is known when the next one begins. Epochs that the "
        "program has saved by then have no loss after a pause, so other epochs may have been "
        "compared. Compare the losses of the same epoch in its output",
    )


def _compare_resumed_losses(again: CheckOutcome, resumed: CheckOutcome) -> Finding:
    before = again.evaluation.curve
    now = resumed.evaluation.curve
    # A program may have saved an epoch whose loss has been lost. Its step is empty.
    shared = sorted(before.keys() & now.keys())
    off = _compute_difference([before[step] for step in shared], [now[step] for step in shared])
    after = "After a resume from the first checkpoint,"
    if off <= _TOLERANCE and max(now) == max(before):
        return ok(f"{after} the losses are the same{_format_within(off)}")
    difference = f"the number of losses is {max(now)} instead of {max(before)}"
    if off > _TOLERANCE:
        difference = f"the losses differ by {_format_relative(off)}"
    return wrong(
        f"{after} {difference}",
        "Save all that training changes, before the loss: optimizer, scheduler, random generators, "
        "number of epochs. Seed random numbers of an epoch by its index",
    )


def inspect_variables(outcomes: CheckOutcomes) -> Iterator[Finding]:
    """Look for a program that reads no variable of torchrun, so that each rank trains alone."""
    if outcomes.script is None:
        return
    if read := sorted(_find_variables(outcomes.whole).intersection(_TORCHRUN_VARIABLES)):
        yield ok(f"The program reads {format_list(read)}")
    if _trains_alone(outcomes):
        yield wrong(
            "The program reads neither RANK, LOCAL_RANK nor WORLD_SIZE: each rank trains alone, on "
            "all samples",
            "Call torch.distributed.init_process_group(), or search with --ranks-per-worker 1",
        )


def _find_variables(outcome: CheckOutcome) -> set[str]:
    """Return the environment variables that a program has read on any rank."""
    return {name for trace in outcome.traces for name in trace.variables}


def _trains_alone(outcomes: CheckOutcomes) -> bool:
    """Return whether each rank of a program trains, and does not know of other ranks."""
    whole = outcomes.whole
    # A program may change the weights without an optimizer of torch.
    is_training = bool(whole.traces[0].steps or whole.traces[0].networks)
    knows_rank = bool(_find_variables(whole).intersection(_RANK_VARIABLES))
    return outcomes.script is not None and whole.ranks > 1 and is_training and not knows_rank


def describe_program(outcomes: CheckOutcomes) -> Iterator[Finding]:
    """Show that the ranks of a program have the same network, and how many losses it reports."""
    whole = outcomes.whole
    script = outcomes.script
    if script is None or whole.failure:
        return
    differ = whole.ranks == 1 or _compare_networks(whole, None) or _has_same_batches(whole)
    if not differ and (steps := _count_equal_steps(whole)):
        shares = _has_samples(whole, whole) and not _count_same_batches(whole)[0]
        batches = ", and train on different batches" if shares else ""
        equal = f"All ranks have the same network after {format_count(steps, 'step')}{batches}"
        yield ok(equal)
    way = "hpo.report"
    if script.pattern is not None:
        way = f"--{script.pattern_name} '{script.pattern}'"
    reports = format_count(len(whole.losses), "report")
    yield ok(f"{reports} by {way} in the first evaluation")


def repeat_remarks(outcomes: CheckOutcomes) -> Iterator[Finding]:
    """Show the warnings that a search would print.

    Ranks with different losses are wrong. A search would notice it before the evaluation ends.
    """
    remarks = chain.from_iterable(outcome.remarks for outcome in outcomes.list_compared())
    for remark in dict.fromkeys(remarks):
        level = wrong if remark.startswith("ranks ") else look
        yield level(f"{remark[0].upper()}{remark[1:]}")


def find_overwritten_files(outcomes: CheckOutcomes) -> Iterator[Finding]:
    """Look for files of a program that several evaluations write."""
    if len(outcomes.files) < 3:
        return
    before, first, second = outcomes.files[:3]
    written = sorted(name for name in first if first[name] != before.get(name))
    if both := [name for name in written if name in second and second[name] != first[name]]:
        yield look(
            f"Evaluations write to the same files: {format_list(both)}",
            "Workers would overwrite these files. Let each evaluation write to its own directory, "
            "{folder}",
        )
    elif written and any(second[name] != first.get(name) for name in second):
        yield ok(
            f"An evaluation writes {format_list(written)}, and the next one writes other files",
        )


def find_running_processes(outcomes: CheckOutcomes) -> Iterator[Finding]:
    """Look for processes that a program leaves behind."""
    traces = [trace for outcome in outcomes.list_compared() for trace in outcome.traces]
    if outcomes.script is not None and any(trace.has_children for trace in traces):
        yield look(
            "Processes are still running when the program ends",
            "They are killed. Let the program wait for them",
        )


PROBES: Sequence[Callable[[CheckOutcomes], Iterator[Finding]]] = (
    find_failure,
    inspect_branches,
    find_different_networks,
    compare_repetition,
    compare_rank_counts,
    find_unused_parameters,
    inspect_weights,
    inspect_checkpoints,
    inspect_variables,
    describe_program,
    repeat_remarks,
    find_overwritten_files,
    find_running_processes,
)


def _describe_failure(outcome: CheckOutcome, text: str) -> Finding:
    """Return the finding about a failure, with advice if its cause is known."""
    messages = f"{outcome.failure}\n{outcome.evaluation.traceback}"
    found = (text for pattern, text in _ADVICE_BY_PATTERN.items() if re.search(pattern, messages))
    unused = _list_unused_parameters(outcome)
    advice = next(found, "").format(unused=f" ({format_list(unused)})" if unused else "")
    return wrong(f"{text}: {cut_text(outcome.failure, _MAX_FAILURE_LENGTH)}", advice)


def _compare_repetition(outcomes: CheckOutcomes) -> Finding:
    """Compare the losses of two evaluations with the same seed and number of ranks."""
    first = outcomes.whole
    again = outcomes.again
    assert again is not None
    text = f"The same seed on {format_count(first.ranks, 'rank')}"
    if first.traces[0].steps and not again.traces[0].steps:
        return look(
            f"{text}: the second evaluation took no step, so nothing was compared",
            "It may have resumed from a checkpoint of the first. Delete it: a search would resume "
            "from it, too",
        )
    off = _compute_difference(first.losses, again.losses)
    if off <= _TOLERANCE:
        return ok(f"{text} has the same losses twice{_format_within(off)}")
    first_weights = next(iter(first.traces[0].weights), ())
    again_weights = next(iter(again.traces[0].weights), ())
    if first_weights and again_weights and _is_different(first_weights, again_weights):
        return wrong(
            f"{text} has different losses the second time, by {_format_relative(off)}: the initial "
            "weights differ",
            _NETWORK_IN_OBJECTIVE if outcomes.script is None else _SEED_OF_PROGRAM,
        )
    same = ", from the same initial weights" if first_weights else ""
    return look(
        f"{text} has different losses the second time, by {_format_relative(off)}{same}",
        "Possible causes: random numbers without worker.seed (loader processes, a Generator, the "
        "clock), a counter of evaluations, or nondeterministic GPU kernels (find them with "
        "torch.use_deterministic_algorithms(True))",
    )


def _find_causes(whole: CheckOutcome, alone: CheckOutcome) -> Iterator[Finding]:
    """Yield one certain cause of different losses on all ranks and 1 rank, or all possible ones."""
    ratios = [
        ours / theirs for ours, theirs in zip(whole.losses, alone.losses, strict=False) if theirs
    ]
    layers = list(_find_rank_dependent_layers(whole.traces[0]))
    tolerance = _SMALL_FRACTION if layers else _SMALL_FRACTION / 10
    for factor in (whole.ranks, 1 / whole.ranks):
        if all(math.isclose(ratio, factor, rel_tol=tolerance) for ratio in ratios):
            yield wrong(
                f"The losses are {factor:.3g} times those of 1 rank",
                "Divide the sum over all ranks by the number of all validation samples. Their mean "
                "of means is right only if their shares are equally large",
            )
            return
    weights = whole.traces[0].weights
    if _has_same_parameters(whole, alone) and _is_different(weights[0], alone.traces[0].weights[0]):
        yield look(
            "The initial weights differ from those on 1 rank",
            "Create the network before anything that depends on the rank or on the number of ranks",
        )
        return
    training = list(_compare_training(whole, alone))
    yield from training
    if all(cause.level == "look" for cause in training):
        yield from layers
    if not training and not layers and (synchronized := whole.traces[0].synchronized_layers):
        yield look(
            f"{_format_layer_counts(synchronized)}: they normalize over all ranks, and rounding "
            "errors grow from step to step",
            "To find other differences, check once with fewer steps and a lower learning rate",
        )


def _advise_unexplained(whole: CheckOutcome, alone: CheckOutcome) -> str:
    ours = next(iter(whole.traces[0].at_loss), ())
    theirs = next(iter(alone.traces[0].at_loss), ())
    if _has_same_parameters(whole, alone) and ours and len(ours) == len(theirs):
        if compute_distance(ours, theirs) <= _TOLERANCE:
            return (
                "The networks are the same at the first loss, so the validation differs. The loss "
                "must include each sample once: divide the sum over all ranks by the number of all "
                "samples"
            )
        return (
            "The gradients of the first step are the same, but the networks differ at the first "
            "loss. If the ranks' shares of the last batch differ in size, use reduction='sum' and "
            "(loss * worker.size / len(batch)).backward()"
        )
    return (
        "No cause was found. Divide the validation loss, summed over all ranks, by the number of "
        "all samples. Weight the ranks' shares of a batch by their sizes"
    )


def _find_rank_dependent_layers(trace: Trace) -> Iterator[Finding]:
    if trace.normalization_layers:
        yield look(
            f"{_format_layer_counts(trace.normalization_layers)}: each rank normalizes with its "
            "own share of a batch",
            "nn.SyncBatchNorm.convert_sync_batchnorm(network) on GPUs, GroupNorm and LayerNorm do "
            "not depend on the number of ranks",
        )
    if trace.random_layers:
        yield look(
            f"{_format_layer_counts(trace.random_layers)}: each rank draws random numbers for its "
            "own share, so losses differ a little",
            "To find other differences, check once with a probability of 0, or without random "
            "numbers",
        )


def _compute_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the largest relative difference between two losses of the same epoch."""
    pairs = list(zip(ours, theirs, strict=False))
    return max((abs(a - b) / max(abs(a), abs(b)) for a, b in pairs if a != b), default=0.0)


def _format_within(off: float) -> str:
    return f", within {off:.0e}" if off else ", to the last digit"


def _format_layer_counts(layers: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in layers.items())


def _compare_training(whole: CheckOutcome, alone: CheckOutcome) -> Iterator[Finding]:
    """Yield findings about the first difference in samples, steps per epoch or gradients."""
    many = whole.traces[0]
    samples = list(_compare_samples(whole, alone))
    ours = _count_epoch_steps(whole)
    theirs = _count_epoch_steps(alone)
    if samples:
        yield from samples
    elif ours and theirs and ours != theirs:
        what = "An epoch has" if many.steps_at_losses else "The training takes"
        yield look(
            f"{what} {format_count(ours, 'step')} on {format_count(whole.ranks, 'rank')} and "
            f"{theirs} on 1: the global batch size differs",
            "If batch_size is the global batch size, a rank takes batch_size // worker.size. "
            "Otherwise, the best learning rate depends on the number of ranks",
        )
    elif not many.random_layers and not many.normalization_layers:
        yield from _compare_gradients(whole, alone)


def _compare_samples(whole: CheckOutcome, alone: CheckOutcome) -> Iterator[Finding]:
    """Yield a finding unless each rank trains on a different share of the samples.

    In the first epoch, the shares together must be the samples of the first epoch on 1 rank.
    """
    if not _has_samples(whole, alone) or not _has_same_shapes(whole, alone, _get_shapes):
        return
    expected = _count_samples(alone)
    trained = _count_samples(whole)
    if not expected or not trained:
        return
    found = expected.keys() & trained.keys()
    share_found = sum(trained[sample] for sample in found) / trained.total()
    nearly_all = (1 - _SMALL_FRACTION) * len(expected)
    ranks = format_count(whole.ranks, "rank")
    if _has_same_batches(whole):
        yield wrong(
            f"Each of {ranks} trains on the same batches",
            f"{ranks} then do the work of 1. Let each rank take its share: use DistributedSampler, "
            "batch[worker.rank :: worker.size], or another seed for the batches of each rank",
        )
    elif (
        share_found < 1 - _SMALL_FRACTION / 10
        # Some samples repeat before all have occurred.
        or len(_take_first_samples(alone.traces[0], len(expected))) < nearly_all
    ):
        yield look(
            "The samples differ from those on 1 rank, so gradients and losses cannot be compared: "
            "batches are drawn or changed at random, or an epoch has a fixed number of steps",
            "To find other differences, check once without augmentation, and with shares of equal "
            "batches",
        )
    elif len(found) < nearly_all:
        repeated = ", and on some of them more than once" if trained.total() > len(found) else ""
        yield wrong(
            f"Of the {len(expected)} samples of 1 rank's first epoch, {ranks} train on "
            f"{len(found)}{repeated}",
            "The order of the samples must be the same on all ranks. Use torch.randperm with a "
            "Generator, torch.Generator().manual_seed(worker.seed + epoch)",
        )
    elif all(
        len(_take_first_samples(trace, len(expected))) >= nearly_all for trace in whole.traces
    ):
        yield look(
            f"Each of {ranks} trains on all {len(expected)} samples, as 1 rank does",
            "More ranks are then not faster. Let each rank take its share, batch[worker.rank :: "
            "worker.size]",
        )


def _compare_gradients(whole: CheckOutcome, alone: CheckOutcome) -> Iterator[Finding]:
    """Yield a finding if first gradients differ between ranks, or from those on 1 rank.

    A difference from 1 rank is "wrong" if the step has the same samples on both. It is also "wrong"
    if the gradients differ by a factor that is the number of ranks or its inverse. All other
    differences are "look".
    """
    if not _has_same_parameters(whole, alone):
        return
    many = whole.traces[0]
    if any(
        _is_different(many.gradients[0], next(iter(other.gradients), ()))
        for other in whole.traces[1:]
    ):
        yield look(
            "The ranks average their weights, not their gradients",
            "Losses then depend on the number of ranks. DistributedDataParallel averages gradients",
        )
        return
    ours = many.gradients[0]
    theirs = alone.traces[0].gradients[0]
    off = compute_distance(ours, theirs)
    if not off > (_BATCH_NORM_TOLERANCE if many.synchronized_layers else _TOLERANCE):
        return
    ratio = compute_norm(ours) / compute_norm(theirs) if compute_norm(theirs) else math.nan
    if any(
        math.isclose(ratio, factor, rel_tol=_TOLERANCE) for factor in (whole.ranks, 1 / whole.ranks)
    ):
        yield wrong(
            f"The gradients of the first step are {ratio:.3g} times those of 1 rank",
            "DistributedDataParallel averages over ranks. If each rank divides the sum of its "
            "losses by the global batch size, multiply by worker.size: (loss * worker.size / "
            "len(batch)).backward()",
        )
        return
    is_same = _has_samples(whole, alone) and (
        _count_samples_until(whole, 1) == _count_samples_until(alone, 1)
    )
    doubt = "" if is_same else ", but the samples differ, or are not known"
    yield Finding(
        "wrong" if is_same else "look",
        "The gradients of the first step differ from those of 1 rank by "
        f"{_format_relative(off)}{doubt}",
        "If the ranks' shares of a batch differ in size, use reduction='sum' and "
        "(loss * worker.size / len(batch)).backward()",
    )


def _compare_networks(whole: CheckOutcome, alone: CheckOutcome | None) -> Finding | None:
    """Return a finding if the ranks' networks differ; None if equal or not comparable.

    Ranks that hold only parts of the network cannot be compared. Their shapes differ from the
    shapes in `alone`. Some programs average weights only at some steps. So networks differ only if
    they differ at the final step that was recorded on both ranks.
    """
    first, *others = whole.traces
    if whole.failure and "different losses" not in whole.failure:
        return None
    shapes = _get_shapes(first)
    if first.sharded or any(_get_shapes(other) != shapes for other in others):
        return None
    # A cancelled program is cut off at a different step on each rank.
    if any(other.steps != first.steps for other in others) and not any(
        trace.was_cut for trace in whole.traces
    ):
        counts = ", ".join(f"rank {rank} {trace.steps}" for rank, trace in enumerate(whole.traces))
        return wrong(
            f"The ranks take different numbers of steps: {counts}",
            "Give all ranks the same number of batches: use DistributedSampler, or "
            "batch[worker.rank :: worker.size]",
        )
    if alone is not None and _get_shapes(alone.traces[0]) not in ([], shapes):
        return None
    for rank, other in enumerate(others, start=1):
        if (steps := _find_difference(first, other)) is not None:
            when = f"after {format_count(steps, 'step')}" if steps else "before the first step"
            return wrong(
                f"The networks of rank 0 and rank {rank} differ {when}",
                "Each rank trains its own network on its share of the samples. Wrap it, model = "
                "DistributedDataParallel(network), and call model(inputs) to train, not network or "
                "model.module. Otherwise, average the gradients over all ranks before each step",
            )
    return None


def _get_shapes(trace: Trace) -> list[list[int]]:
    """Return the parameter shapes of a rank's networks, or of its optimizers without any."""
    return trace.network_shapes if trace.networks else trace.shapes


def _find_difference(one: Trace, other: Trace) -> int | None:
    """Return the first step at which networks differ; None if they end equal."""
    mine = _get_networks(one)
    others = _get_networks(other)
    found = []
    for number in {key[0] for key in mine}:
        common = sorted(key for key in mine.keys() & others.keys() if key[0] == number)
        apart = [key for key in common if _is_different(mine[key], others[key])]
        if apart and apart[-1] == common[-1]:
            found.append(apart[0][1])
    return min(found, default=None)


def _count_equal_steps(whole: CheckOutcome) -> int:
    """Return the most steps after which all ranks had equal networks; 0 if never."""
    first, *others = (_get_networks(trace) for trace in whole.traces)
    equal = [
        key[1]
        for key, network in first.items()
        if all(key in other and not _is_different(network, other[key]) for other in others)
    ]
    return max(equal, default=0)


def _get_networks(trace: Trace) -> Mapping[tuple[int, int, bool], Fingerprint]:
    """Return the fingerprints of a rank's networks, or of its optimizers without any."""
    if trace.networks:
        return {(number, steps, trains): found for number, steps, trains, found in trace.networks}
    return {(number, 0, True): weights for number, weights in enumerate(trace.weights)}


def _has_samples(whole: CheckOutcome, alone: CheckOutcome) -> bool:
    """Return whether samples were recorded on all ranks, in both evaluations."""
    return all(
        any(hashes for _, hashes in trace.samples) for trace in [*whole.traces, *alone.traces]
    )


def _count_samples(outcome: CheckOutcome) -> Counter[str]:
    """Count each sample of the first epoch on all ranks together, by its hash."""
    limit = min(trace.steps for trace in outcome.traces)
    return _count_samples_until(outcome, min(_count_epoch_steps(outcome) or limit, limit))


def _count_samples_until(outcome: CheckOutcome, step: int) -> Counter[str]:
    """Count each sample of the steps before `step` on all ranks together, by its hash."""
    batches = [
        hashes for trace in outcome.traces for steps, hashes in trace.samples if steps < step
    ]
    return Counter(chain.from_iterable(batches))


def _take_first_samples(trace: Trace, count: int) -> set[str]:
    """Return the distinct samples among the first `count` samples of a rank."""
    return set(islice(chain.from_iterable(hashes for _, hashes in trace.samples), count))


def _has_same_batches(whole: CheckOutcome) -> bool:
    """Return whether most of several batches are the same on all ranks."""
    same, count = _count_same_batches(whole)
    return same > count / 2 and len({tuple(hashes) for _, hashes in whole.traces[0].samples}) > 1


def _count_same_batches(whole: CheckOutcome) -> tuple[int, int]:
    """Return how many batches are the same on all ranks, and how many were compared."""
    batches = list(zip(*(trace.samples for trace in whole.traces), strict=False))
    return sum(
        bool(first[1]) and all(other == first for other in others) for first, *others in batches
    ), len(batches)


def _has_same_parameters(whole: CheckOutcome, alone: CheckOutcome) -> bool:
    """Return whether optimizers have the same, unsharded shapes on all ranks as on 1."""
    return _has_same_shapes(whole, alone, lambda trace: trace.shapes)


def _has_same_shapes(
    whole: CheckOutcome, alone: CheckOutcome, get_shapes: Callable[[Trace], list[list[int]]]
) -> bool:
    shapes = get_shapes(alone.traces[0])
    return bool(shapes) and all(
        get_shapes(trace) == shapes and not trace.sharded
        for trace in [*whole.traces, *alone.traces]
    )


def _count_epoch_steps(outcome: CheckOutcome) -> int | None:
    """Return the number of steps in the first epoch; None if it is unknown.

    A program does not record its steps at losses. For a program, the result is the number of steps
    until the final loss, or until the end of the program.
    """
    trace = outcome.traces[0]
    losses = len(outcome.losses)
    if trace.steps_at_losses:
        return next((steps for steps in trace.steps_at_losses if steps), trace.steps)
    validated: list[int] = sorted({steps for _, steps, trains, _ in trace.networks if not trains})
    if 0 < losses <= len(validated):
        return validated[losses - 1]
    return None if any(one.was_cut for one in outcome.traces) else trace.steps


def _is_different(one: Fingerprint, other: Fingerprint) -> bool:
    """Return whether two fingerprints, and so weights or gradients, differ beyond rounding."""
    return len(one) != len(other) or not compute_distance(one, other) <= _FINGERPRINT_TOLERANCE


def _format_relative(off: float) -> str:
    return f"{off:.1%}" if off >= 0.001 else f"{off:.0e}"


def _list_unused_parameters(outcome: CheckOutcome) -> list[str]:
    return sorted({name for trace in outcome.traces for name in trace.without_gradient})
