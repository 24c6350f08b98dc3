"""Find advice for failed evaluations: patterns recognize the messages of common mistakes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hpo.check.check_evaluator import CheckOutcome
from hpo.process.trace import Trace
from hpo.text_format import format_count

_MAX_NAMES = 5

_REDUCE_ADVICE = (
    "A rank yields the loss of its own share or of its own network. Add up the sums over all ranks, "
    "dist.all_reduce(total), and divide by the number of all samples"
)
_LOADER_ADVICE = (
    "Loader processes that are not forked cannot import the search file (No module named 'search_file_...'). Leave "
    "multiprocessing_context out, or put the Dataset into a module next to the file"
)
_DIVERGENCE_ADVICE = (
    "This is normal for some hyperparameters. If these should be good, check the data and the loss, and narrow the "
    "learning rate. --enqueue FILE checks another individual"
)
_UNUSED_ADVICE = (
    "Some parameters had no part in the loss{unused}. Freeze them by requires_grad_(False) before "
    "DistributedDataParallel wraps the network, or pass find_unused_parameters=True"
)
_COLLECTIVES_ADVICE = (
    "The ranks of a worker must call the same collectives (all_reduce, a backward pass of DistributedDataParallel, "
    "a yield) equally often. Look for different numbers of steps, and for calls inside if worker.rank == 0"
)
_EPOCHS_ADVICE = (
    "The ranks must train the same number of epochs. Base early stopping on a value that is equal on all ranks, such "
    "as an all-reduced loss"
)

# The first pattern that matches the failure or the traceback determines the advice.
_ADVICE_BY_PATTERN = [
    (r"the ranks yielded different losses", _REDUCE_ADVICE),
    (r"do not yield equally many losses", _EPOCHS_ADVICE),
    (r"DataLoader worker .* exited unexpectedly", _LOADER_ADVICE),
    (r"Expected to have finished reduction", _UNUSED_ADVICE),
    (r"the ranks are in different collectives", _COLLECTIVES_ADVICE),
    (r"timeout: .*( at its end for rank|, which had ended)", _EPOCHS_ADVICE),
    (r"timeout: ", _COLLECTIVES_ADVICE),
    (
        r"the objective yielded no loss",
        "Yield the validation loss after each epoch; a function without any yield may return it",
    ),
    (
        r"an objective must yield its validation loss, a number, got None",
        "Every rank must yield the loss. If only one rank computes it, send it to the others by dist.broadcast",
    ),
    (
        r"FileNotFoundError: .*a relative path",
        "Make the path a setting, --set data=/path/to/it, or use an absolute path",
    ),
    (r"the validation loss is (nan|-?inf)", _DIVERGENCE_ADVICE),
]


def find_failure_advice(outcome: CheckOutcome) -> str:
    """Return the advice for a failed evaluation; an empty text if the failure is unknown."""
    messages = f"{outcome.failure}\n{outcome.evaluation.traceback}"
    text = next((text for pattern, text in _ADVICE_BY_PATTERN if re.search(pattern, messages)), "")
    return text.format(unused=_format_unused(outcome.traces))


def _format_unused(traces: Sequence[Trace]) -> str:
    names = sorted({name for trace in traces for name in trace.without_gradient})
    return f" ({format_name_list(names)})" if names else ""


def format_name_list(names: Sequence[str]) -> str:
    """Return names separated by commas. Of more than five names, return five and the number of others."""
    rest = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {format_count(rest, 'more')}".removesuffix("s") if rest > 0 else "")
