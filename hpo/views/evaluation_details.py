"""Find evaluations of a run, and collect all facts about them, also for other programs.

The label of an evaluation is "7" for trial 7 of the search, and "confirm-7" for trial 7 of the
confirmation.
"""

from __future__ import annotations

import math
import operator
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from typing import Any

from hpo.errors import UsageError
from hpo.results.confirmation import make_plan
from hpo.results.reader import RunReader, RunSnapshot
from hpo.results.recommendation import find_winner
from hpo.store.evaluations import Evaluation
from hpo.store.output_log import LogTail, read_log_tail
from hpo.store.pareto_front import find_front
from hpo.store.run_dir import RunDir
from hpo.text_format import escape_unencodable


@dataclass(frozen=True)
class EvaluationDetails:
    """All facts about one evaluation: its record, and what other evaluations and its log say."""

    evaluation: Evaluation
    """The evaluation as recorded."""
    study: str
    """Name of the study that contains it."""
    in_use: bool | None
    """Whether the run is active now; None if this host cannot see that."""
    seed: int | None
    """Seed of the training; None if it is unknown, for example if another run has trained it."""
    retried_by: int | None
    """Later trial of the same individual, if this one was interrupted or promoted."""
    retried_state: str
    """State of the previous trial of the same individual; "" if this is the first trial."""
    confirmed_by: list[Evaluation]
    """Evaluations that train the same hyperparameters with other seeds."""
    log_end: LogTail | None
    """The final lines of its log file; None if no log file exists."""
    is_on_front: bool | None = None
    """Whether it is on the Pareto front; None if the loss is the only objective."""
    dominated_by: int | None = None
    """A trial on the front that is as good or better in all objectives, if there is one."""


class EvaluationLookup:
    """Evaluations of a run, as they were when they were read, with a search by label.

    Args:
        snapshot: Evaluations and confirmations of the run, and whether it is active.
    """

    def __init__(self, run_dir: RunDir, snapshot: RunSnapshot) -> None:
        self.run_dir = run_dir
        self._run = snapshot.manifest
        self._in_use = snapshot.is_in_use
        self._evaluations = snapshot.evaluations
        self._confirmations = snapshot.confirmations

    @classmethod
    def read(cls, reader: RunReader) -> EvaluationLookup:
        """Read all evaluations of a run, and return a lookup for them."""
        # Read first: if the run has ended, the study is complete.
        in_use = reader.run_dir.is_in_use
        evaluations = reader.read_evaluations()
        confirmations = reader.read_confirmations(all_plans=True)
        snapshot = RunSnapshot(time.time(), reader.manifest, evaluations, confirmations, in_use)
        return cls(reader.run_dir, snapshot)

    def find_evaluation(self, label: str) -> Evaluation:
        """Return the evaluation with a label, such as "7" (search) or "confirm-0" (confirmation).

        Raises:
            UsageError: `label` is not a label, or no evaluation has this label.
        """
        if not re.fullmatch(r"(confirm-)?[0-9]{1,18}", label):
            raise UsageError(f"TRIAL must be a number or confirm-N, got {label!r}.")
        trial = int(label.removeprefix("confirm-"))
        evaluations = self._confirmations if label.startswith("confirm-") else self._evaluations
        found = _find_trial(evaluations, trial)
        if found is None:
            spans = map(_format_span, (self._evaluations, self._confirmations))
            available = " and ".join(filter(None, spans)) or "none yet"
            raise UsageError(f"{self.run_dir.path} has no trial {label}. Its trials: {available}")
        return found

    def choose_evaluation(self) -> tuple[Evaluation, str]:
        """Return the most relevant evaluation of the run, and the reason for this choice as text.

        This is the winner (the recommended evaluation), or the latest failed evaluation if none has
        succeeded.

        Raises:
            UsageError: No evaluation has succeeded or failed.
        """
        confirmations = make_plan(self._run).select_planned(self._confirmations)
        winner = find_winner(self._evaluations, confirmations, self._run.objectives)
        if winner is not None:
            have_ended = all(evaluation.is_finished for evaluation in confirmations)
            complete = {e.confirms for e in confirmations if e.state == "complete"}
            is_confirmed = have_ended and winner.trial in complete
            loss = "mean loss over other seeds" if is_confirmed else "loss"
            return winner, f"the winner: the lowest {loss}"
        failed = self.list_failed()
        if failed:
            return failed[0], "the latest failure, since no evaluation has succeeded"
        raise UsageError(
            f"{self.run_dir.path}: no evaluation has succeeded or failed. Name one of its trials: "
            f"{_format_span(self._evaluations) or 'none yet'}"
        )

    def list_failed(self) -> list[Evaluation]:
        """Return all failed evaluations, the latest failure first."""
        everything = [*self._evaluations, *self._confirmations]
        failed = [evaluation for evaluation in everything if evaluation.state == "failed"]
        return sorted(failed, key=lambda e: (e.ended, e.trial), reverse=True)

    def collect_details(self, evaluation: Evaluation) -> EvaluationDetails:
        """Return all known facts about an evaluation."""
        trial, confirms = evaluation.trial, evaluation.confirms is not None
        siblings = self._confirmations if confirms else self._evaluations
        retries = (sibling.trial for sibling in siblings if sibling.retry_of == trial)
        retried = _find_trial(siblings, evaluation.retry_of)
        is_on_front, dominated_by = self._compare_with_front(evaluation)
        return EvaluationDetails(
            evaluation,
            study=self._run.confirmation_study if confirms else self._run.study,
            in_use=self._in_use,
            seed=self._find_seed(evaluation),
            retried_by=next(retries, None),
            retried_state=retried.state if retried else "",
            confirmed_by=[e for e in self._confirmations if not confirms and e.confirms == trial],
            log_end=read_log_tail(self.run_dir.get_log_path(trial, confirms)),
            is_on_front=is_on_front,
            dominated_by=dominated_by,
        )

    def _find_seed(self, evaluation: Evaluation) -> int | None:
        """Return the seed of an evaluation; None if it is unknown."""
        if evaluation.seed is not None or evaluation.imported_from:
            return evaluation.seed
        is_seed_of_run = evaluation.state == "waiting" or len(self._run.sessions) == 1
        return self._run.seed if is_seed_of_run else None

    def _compare_with_front(self, evaluation: Evaluation) -> tuple[bool | None, int | None]:
        """Return `is_on_front` and `dominated_by` of an evaluation's details."""
        objectives = self._run.objectives
        if not objectives.is_multi_objective:
            return None, None
        if evaluation.state != "complete" or evaluation.confirms is not None:
            return False, None
        if _find_trial(self._front, evaluation.trial):
            return True, None
        own = objectives.compute_costs(evaluation.values)
        for candidate in self._front:
            if all(map(operator.le, objectives.compute_costs(candidate.values), own)):
                return False, candidate.trial
        return False, None

    @cached_property
    def _front(self) -> list[Evaluation]:
        return find_front(self._evaluations, self._run.objectives)


def _find_trial(evaluations: Sequence[Evaluation], trial: int | None) -> Evaluation | None:
    return next((evaluation for evaluation in evaluations if evaluation.trial == trial), None)


def _format_span(evaluations: Sequence[Evaluation]) -> str:
    """Return the first and the last label as text, such as "0 to 7"; empty without evaluations."""
    if not evaluations:
        return ""
    first, last = evaluations[0].label, evaluations[-1].label
    return first if first == last else f"{first} to {last}"


def list_fields(study: str, evaluation: Evaluation) -> dict[str, Any]:
    """Return the facts in an evaluation's record that other programs read; None if unknown."""
    has_started = evaluation.state != "waiting"
    is_bred = has_started and not evaluation.imported_from and evaluation.confirms is None
    return {
        "study": study,
        "trial": evaluation.trial,
        "label": evaluation.label,
        "state": evaluation.state,
        "loss": evaluation.loss,
        "params": evaluation.params,
        "metrics": evaluation.metrics,
        "island": evaluation.island if has_started else None,
        "worker": evaluation.worker if has_started else None,
        "generation": evaluation.generation if is_bred else None,
        "propagator": evaluation.propagator or None,
        "immigrants": dict(evaluation.immigrants),
        "seed": evaluation.seed,
        "imported_from": evaluation.imported_from or None,
        "confirms": evaluation.confirms,
        "confirmed_by": [],
        "inherits": evaluation.inherits,
        "retry_of": evaluation.retry_of,
        "retried_by": None,
        "crash_count": evaluation.crash_count,
        "resumed_from_step": evaluation.resumed_from_step or None,
        "checkpoint_step": evaluation.checkpoint_step or None,
        "paused_after": evaluation.paused_after or None,
        "cut_after": evaluation.cut_after or None,
        "started": _make_datetime(evaluation.started),
        "ended": _make_datetime(evaluation.ended),
        "seconds": evaluation.seconds if evaluation.has_ended else None,
        "epochs": max(evaluation.curve, default=0),
        "losses": {str(epoch): evaluation.curve[epoch] for epoch in sorted(evaluation.curve)},
        "failure": evaluation.failure if evaluation.state == "failed" else None,
        "traceback": evaluation.traceback or None,
    }


def make_json_content(details: EvaluationDetails) -> dict[str, Any]:
    """Return all facts about an evaluation as a dictionary for `json.dumps`."""
    log_end = details.log_end
    content = list_fields(details.study, details.evaluation) | {
        "seed": details.seed,
        "confirmed_by": [confirmation.label for confirmation in details.confirmed_by],
        "retried_by": details.retried_by,
        "logs": log_end
        and {"path": str(log_end.path), "before": log_end.lines_before, "lines": log_end.lines},
    }
    if details.is_on_front is not None:
        content["front"] = details.is_on_front
    return {name: _make_json_value(value) for name, value in content.items()}


def _make_json_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {_make_json_value(name): _make_json_value(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_make_json_value(item) for item in value]
    return format_time(value) if isinstance(value, datetime) else make_plain_value(value)


def make_plain_value(value: Any) -> Any:
    """Return None for NaN and infinity, and escape characters that UTF-8 cannot encode."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return escape_unencodable(value) if isinstance(value, str) else value


def _make_datetime(seconds: float) -> datetime | None:
    return datetime.fromtimestamp(seconds, timezone.utc) if math.isfinite(seconds) else None


def format_time(time: datetime) -> str:
    """Return a time as ISO 8601 with microseconds."""
    return time.isoformat(timespec="microseconds")
