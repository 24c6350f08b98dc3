"""The winner of a run: which individual it recommends, and what its network does on data that no search has seen."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpo.errors import UsageError
from hpo.objectives import LOSS, ONLY_LOSS, Objectives
from hpo.prediction import MOST_PREDICTIONS, MOST_TEXTS, shorten_text
from hpo.problem import Problem
from hpo.results.confirmation import compare_confirmed
from hpo.results.trained_network import find_network
from hpo.store.evaluations import Evaluation
from hpo.store.pareto_front import find_front
from hpo.store.run_dir import RunDir, write_json
from hpo.text_format import make_printable

RunTest = Callable[[dict[str, Any], Path], Iterator[Mapping[str, Any]]]
"""Tests the network with these hyperparameters and the weights in a file, and yields the parts of the result."""

_SAMPLE_FIELDS: dict[str, type] = {"image": str, "label": str, "predicted": str, "confidence": float, "wrong": bool}


class FailedTestError(Exception):
    """The test of a network has failed: a line of the user's code, the type of the error and its message."""


def find_winner(
    evaluations: Sequence[Evaluation], confirmations: Sequence[Evaluation], objectives: Objectives = ONLY_LOSS
) -> Evaluation | None:
    """Return the evaluation that a run recommends; of several objectives, it is one of the front.

    If all confirmations have finished, it is the individual with the lowest mean loss over other seeds, and otherwise
    the one with the lowest loss.
    """
    confirmed = compare_confirmed(confirmations) if all(one.is_finished for one in confirmations) else []
    best = find_front(evaluations, objectives)
    among = {one.trial: one for one in (best if objectives.is_multi_objective else evaluations)}
    first = next((entry for entry in confirmed if entry["trial"] in among), None)
    if first is not None and first["mean"] is not None:
        return among[first["trial"]]
    return next(iter(best), None)


def find_best_by(name: str, evaluations: Sequence[Evaluation], objectives: Objectives) -> Evaluation | None:
    """Return the evaluation of the front that is best in one objective, None where nothing has succeeded.

    Of equal ones, it is the one with the lowest loss. Raises UsageError where there is no such objective.
    """
    if name not in objectives.names:
        close = difflib.get_close_matches(name, objectives.names, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        several = f"objectives of this run are {', '.join(map(make_printable, objectives.names))}"
        there = several if objectives.is_multi_objective else f"only objective is {LOSS}"
        raise UsageError(f"--by {make_printable(name)}: {hint}the {there}")
    place = objectives.names.index(name)
    return min(
        find_front(evaluations, objectives), key=lambda one: objectives.compute_costs(one.values)[place], default=None
    )


def find_confirmed_entry(chosen: Evaluation, confirmations: Sequence[Evaluation]) -> dict[str, Any] | None:
    """Return what other seeds did to an individual, see `compare`; None if it was not confirmed, or not all have been.

    `confirmations` are those that the run has planned.
    """
    if not all(one.is_finished for one in confirmations):
        return None
    entries = compare_confirmed(confirmations)
    return next((one for one in entries if one["trial"] == chosen.trial and one["mean"] is not None), None)


def run_winner_test(
    run_dir: RunDir,
    problem: Problem,
    winner: Evaluation,
    run_test: RunTest,
    confirmations: Sequence[Evaluation] = (),
) -> dict[str, Any] | None:
    """Test the network of a run's winner, and record and return the result; None if it cannot be, or has been, tested.

    It is the network that `find_network` chooses. `run_test(params, weights)` yields the parts of the result, as
    `hpo.trainer.final_test.test` does in a trainer. Test data are only for this: a network that was chosen by its
    result on them would need other data to be tested with. Weights that were trained with other settings, before the
    run was resumed, are not tested.

    Raises FailedTestError if the test fails.
    """
    network = find_network(run_dir, winner, confirmations) if problem.file.has_test else None
    expected = (winner.params, run_dir.read_manifest().settings)
    if network is None or (network.info.params, network.info.settings) != expected:
        return None
    about: dict[str, Any] = {"trial": winner.trial, "confirmation": network.info.confirmation}
    before = _read_test_json(run_dir)  # The test of an earlier winner, before the run was resumed.
    if before is not None and about.items() <= before.items():
        return None
    times = 1 + (before["times"] if before is not None else 0)
    content: dict[str, Any] | None = None
    for part in run_test(dict(winner.params), network.path.absolute()):
        if part["kind"] == "metrics":
            content = {**about, "times": times, "metrics": _parse_metrics(part), "predictions": [], "texts": []}
        elif part["kind"] == "samples" and content is not None:
            content |= _parse_samples(part)
        else:
            raise FailedTestError(part.get("text", "it gave no metrics"))
        write_json(run_dir.test_json, content)  # First without samples, which may fail: the test has been made.
    if content is None:
        raise FailedTestError("it gave no metrics")
    return content


def read_winner_test(run_dir: RunDir, winner: Evaluation) -> dict[str, Any] | None:
    """Return the result of the winner's test; None where it was not tested.

    It has metrics, predictions, texts, and `times`: how many networks of this run had been tested by then, this one
    too. `confirmation` is the trial that trained the network with another seed, None if the search did.
    """
    content = _read_test_json(run_dir)
    return content if content is not None and content["trial"] == winner.trial else None


def _read_test_json(run_dir: RunDir) -> dict[str, Any] | None:
    try:
        content = json.loads(run_dir.test_json.read_text(encoding="utf-8"))
        confirmation = content.get("confirmation")
        about = {"trial": int(content["trial"]), "confirmation": None if confirmation is None else int(confirmation)}
        return {**about, "times": int(content["times"]), "metrics": _parse_metrics(content), **_parse_samples(content)}
    except (OSError, KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
        return None  # It is missing, or was edited.


def _parse_metrics(content: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(metric) for name, metric in content["metrics"].items()}


def _parse_samples(content: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return predictions and texts in the types that they are shown in; runs of earlier versions have no texts."""
    predictions, texts = content["predictions"][:MOST_PREDICTIONS], content.get("texts", [])[:MOST_TEXTS]
    return {
        "predictions": [{name: kind(one[name]) for name, kind in _SAMPLE_FIELDS.items()} for one in predictions],
        "texts": [shorten_text(str(one["prompt"]), str(one["text"])) for one in texts],
    }
