"""What a tracker does, and what all trackers need: names, texts and numbers that each of them accepts."""

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

LOSS_CURVE = "loss"  # after each epoch
LOWEST_LOSS = "lowest_loss"  # of the evaluation
_RESERVED_NAMES = ("seconds", "state", "failure")  # that trackers show themselves, some of them beside metrics
_LONGEST_NAME = 100
_LONGEST_TEXT = 500
_SECRETS = (
    (r"://[^\s'\"]*@", "://***@"),
    (r"(://[^\s'\"/:@]*):(?!\d+(\D|$))[^\s'\"]*", r"\1:***"),  # the package has cut the URL before the @
    (r"([?&][^\s=&'\"]*(?:pass|pwd|secret|token|key)[^\s=&'\"]*=)[^\s&'\"]*", r"\1***"),
)


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker shows: its unique `id`, its run.json, and the folder for the tracker's files.

    `say` tells a person something, in one line.
    """

    id: str
    manifest: Manifest
    folder: Path
    notify: Callable[[str], None]

    @property
    def name(self) -> str:
        """The name of the run."""
        return clean_text(self.manifest.study, _LONGEST_NAME)

    @property
    def project_name(self) -> str:
        """The name of the search space, under which trackers group its runs."""
        return clean_name(Path(self.manifest.search_space or "hpo").stem)


class Tracker(Protocol):
    """Shows individuals at a place; `place` names it, since a tracker may show the same run at several places.

    Individuals are shown when they have started, repeatedly while they are evaluated, and finally when they have ended.
    Several are evaluated at the same time. An individual that is paused or interrupted has ended for now.
    """

    destination: str

    def show_individual(self, evaluation: Evaluation, losses: Mapping[int, float], from_start: bool) -> None:
        """Show an individual as it is now; `losses`, by their epochs, are those that have not been shown before.

        If it `begins`, nothing is open for it, or earlier losses are no longer true: write it again as a whole, and
        remove what this process or an earlier one has written of it.
        """

    def close(self, is_budget_spent: bool) -> None:
        """Write what is not written yet; `spent` is whether the budget of the run is."""


def make_title(evaluation: Evaluation) -> str:
    """Return a name for an individual, whose `trial` is the first: no other of its run has it."""
    if evaluation.confirms is None:
        return f"trial-{evaluation.trial:04d}"
    return f"confirms-{evaluation.confirms:04d}-{evaluation.trial:04d}"


def find_timestamp(evaluation: Evaluation) -> float:
    """Return the time at which trackers show an evaluation's state: its end, or now while it runs.

    The study does not say when an epoch ended. Where the clock was set in between, it is not before the start.
    """
    now = evaluation.ended if math.isfinite(evaluation.ended) else time.time()
    return max(evaluation.started, now) if math.isfinite(evaluation.started) else now


def convert_params(evaluation: Evaluation, taken: Sequence[str] = ()) -> dict[str, Any]:
    """Return hyperparameters in a form that any tracker accepts; none of them has a name in `taken`."""
    names = make_distinct({name: clean_name(name) for name in evaluation.params}, taken, PARAM_PREFIX)
    return {names[n]: clean_text(v) if isinstance(v, str) else v for n, v in evaluation.params.items()}


def collect_results(evaluation: Evaluation) -> dict[str, float]:
    """Return an evaluation's metrics, its lowest loss and its seconds, without those that it does not have."""
    names = make_distinct(
        {name: clean_name(name) for name in evaluation.metrics},
        (LOSS_CURVE, LOWEST_LOSS, *_RESERVED_NAMES),
        METRIC_PREFIX,
    )
    metrics = {names[name]: value for name, value in evaluation.metrics.items()}
    own = {LOWEST_LOSS: evaluation.loss, "seconds": evaluation.seconds}
    return {**metrics, **{name: value for name, value in own.items() if math.isfinite(value)}}


def collect_context(evaluation: Evaluation) -> dict[str, str | int]:
    """Return where and how an evaluation was made."""
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
    """Return a text so that any tracker can store it: without control characters, and not too long."""
    return cut_text(escape_invisible(given, keep="\n"), longest)


def remove_secrets(message: str) -> str:
    """Return a message without the user names, passwords and tokens in its URLs: packages quote whole URLs."""
    for pattern, instead in _SECRETS:
        message = re.sub(pattern, instead, message, flags=re.IGNORECASE)
    return message


def clean_name(given: str) -> str:
    """Return a name so that any tracker accepts it: letters, digits, spaces, and some of what joins them."""
    return re.sub(r"^\W|[^\w.\- ]", "_", escape_unencodable(given))[:_LONGEST_NAME] or "_"
