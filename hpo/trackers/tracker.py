"""Define the interface of trackers, and convert names, texts and numbers to what all accept."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hpo.results.display_names import METRIC_PREFIX, PARAM_PREFIX, make_distinct
from hpo.store.evaluations import Evaluation
from hpo.store.manifest import Manifest
from hpo.text_format import cut_text, escape_invisible, escape_unencodable

LOSS_CURVE = "loss"  # name of the metric with one value per epoch
LOWEST_LOSS = "lowest_loss"  # name of the metric with the lowest loss of the evaluation
# Names that trackers use themselves, some of them for metrics.
_RESERVED_NAMES = ("seconds", "state", "failure")
_LONGEST_NAME = 100
_LONGEST_TEXT = 500
_SECRETS = (
    (r"://[^\s'\"]*@", "://***@"),
    # A URL that the package has cut before the @.
    (r"(://[^\s'\"/:@]*):(?!\d+(\D|$))[^\s'\"]*", r"\1:***"),
    (r"([?&][^\s=&'\"]*(?:pass|pwd|secret|token|key)[^\s=&'\"]*=)[^\s&'\"]*", r"\1***"),
)


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker shows."""

    id: str
    manifest: Manifest
    folder: Path
    """Directory for the tracker's files."""
    notify: Callable[[str], None]
    """Function that prints a message of one line for the user."""

    @property
    def name(self) -> str:
        """Name of the run."""
        return clean_text(self.manifest.study, _LONGEST_NAME)

    @property
    def project_name(self) -> str:
        """Name of the search space, under which trackers group runs."""
        return clean_name(Path(self.manifest.search_space or "hpo").stem)


class Tracker(Protocol):
    """Interface of a tracker, which shows the individuals of a run to the user.

    `show_individual` is called when the evaluation of an individual starts, repeatedly while it
    runs, and when it ends. Several individuals are evaluated at the same time. A paused or
    interrupted evaluation counts as ended until a later trial resumes it.

    Attributes:
        destination: Name of the store or server that receives the run. If the run is resumed, it
            may be sent elsewhere.
    """

    destination: str

    def show_individual(
        self, evaluation: Evaluation, losses: Mapping[int, float], from_start: bool
    ) -> None:
        """Show the current state of an individual.

        Args:
            evaluation: The evaluation of the individual, with the number of its first trial.
            losses: Losses by epoch that were not in previous calls.
            from_start: Whether the individual is new, or its earlier losses are invalid. The
                tracker must then delete all that it has written about the individual, and write it
                as a whole.
        """

    def close(self, is_budget_spent: bool) -> None:
        """Write all pending data and close."""


def make_title(evaluation: Evaluation) -> str:
    """Return a name of an individual that is unique in its run, from its first trial."""
    if evaluation.confirms is None:
        return f"trial-{evaluation.trial:04d}"
    return f"confirms-{evaluation.confirms:04d}-{evaluation.trial:04d}"


def find_timestamp(evaluation: Evaluation) -> float:
    """Return the time that trackers show: the end of an evaluation, or now if it is running.

    It is also shown for each loss, because the study does not record when an epoch ended. It is
    never before the start, even if the clock was set back.
    """
    now = evaluation.ended if math.isfinite(evaluation.ended) else time.time()
    return max(evaluation.started, now) if math.isfinite(evaluation.started) else now


def convert_params(evaluation: Evaluation, taken: Sequence[str] = ()) -> dict[str, Any]:
    """Return hyperparameters by names that all trackers accept, and that are not in `taken`."""
    cleaned = {name: clean_name(name) for name in evaluation.params}
    names = make_distinct(cleaned, taken, PARAM_PREFIX)
    return {
        names[name]: clean_text(value) if isinstance(value, str) else value
        for name, value in evaluation.params.items()
    }


def collect_results(evaluation: Evaluation) -> dict[str, float]:
    """Return the metrics, the lowest loss and the seconds of an evaluation, if they are known."""
    cleaned = {name: clean_name(name) for name in evaluation.metrics}
    names = make_distinct(cleaned, (LOSS_CURVE, LOWEST_LOSS, *_RESERVED_NAMES), METRIC_PREFIX)
    metrics = {names[name]: value for name, value in evaluation.metrics.items()}
    own = {LOWEST_LOSS: evaluation.loss, "seconds": evaluation.seconds}
    return {**metrics, **{name: value for name, value in own.items() if math.isfinite(value)}}


def collect_context(evaluation: Evaluation) -> dict[str, str | int]:
    """Return the island, worker, propagator and other facts about how an evaluation was created."""
    given = {
        "kind": "evaluation" if evaluation.confirms is None else "confirmation",
        "trial": evaluation.trial,
        "island": evaluation.island,
        "worker": evaluation.worker,
        "generation": evaluation.generation,
        "propagator": evaluation.propagator,
        "confirms": evaluation.confirms,
        "seed": evaluation.seed,
    }
    return {name: value for name, value in given.items() if value is not None}


def clean_text(given: str, longest: int = _LONGEST_TEXT) -> str:
    """Return a text that all trackers can store, without control characters, and cut if long."""
    return cut_text(escape_invisible(given, keep="\n"), longest)


def remove_secrets(message: str) -> str:
    """Replace secrets in the URLs of a message by ***. Packages quote URLs in their errors."""
    for pattern, instead in _SECRETS:
        message = re.sub(pattern, instead, message, flags=re.IGNORECASE)
    return message


def clean_name(given: str) -> str:
    """Return a name of letters, digits, spaces, dots, hyphens and underscores."""
    return re.sub(r"^\W|[^\w.\- ]", "_", escape_unencodable(given))[:_LONGEST_NAME] or "_"
