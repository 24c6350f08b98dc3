"""Find advice for failed evaluations: patterns recognize the messages of common mistakes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hpo.check.check_evaluator import CheckOutcome
from hpo.process.trace import Trace
from hpo.text_format import format_count

_MAX_NAMES = 5

_REDUCE_ADVICE = (
    "A rank yields the loss of its own share, or of a network of its own: add up the sums over all ranks, "
    "dist.all_reduce(total), and divide by the number of all samples"
)
_LOADER_ADVICE = (
    "Loader processes that are not forked cannot import the search file (No module named 'search_file_...'): leave "
    "multiprocessing_context out, or put the Dataset into a module next to the file, my_data.py, and import it"
)
_DIVERGENCE_ADVICE = (
    "Some hyperparameters do that in any search. Where these should be good ones, look at the data and the loss, and "
    "narrow the learning rate; --enqueue FILE checks another individual"
)
_UNUSED_ADVICE = (
    "Parameters that had no part in the loss{unused}: freeze them, requires_grad_(False), before "
    "DistributedDataParallel sees the network, or give it find_unused_parameters=True (with hpo.training.fit: or "
    "parallel=shard)"
)
_COLLECTIVES_ADVICE = (
    "The ranks of a worker have to call the same collectives (all_reduce, a backward pass of DistributedDataParallel, "
    "a yield) equally often: look for numbers of steps that differ, and for what is only done if worker.rank == 0"
)
_EPOCHS_ADVICE = (
    "The ranks have to train equally many epochs: end early by what is the same on all of them, such as a loss that "
    "was all_reduced"
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
        "Every rank has to yield the loss: where only one computes it, dist.broadcast it to the others",
    ),
    (
        r"FileNotFoundError: .*a relative path",
        "Let it be a setting, --set data=/path/to/it, or write an absolute path",
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
