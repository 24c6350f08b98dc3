"""Select the evaluation that a run recommends, and test its network on data that the search has not used.

The planned confirmations are the trainings with other seeds that the latest session requires.
"""

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
from hpo.results.confirmation import ConfirmedIndividual, compare_confirmed
from hpo.results.trained_network import find_network
from hpo.store.evaluations import Evaluation
from hpo.store.pareto_front import find_front
from hpo.store.run_dir import RunDir, write_json
from hpo.text_format import make_printable

RunTest = Callable[[dict[str, Any], Path], Iterator[Mapping[str, Any]]]
"""Function that tests the network with these hyperparameters and weights, and yields the parts of the result."""

_SAMPLE_FIELDS: dict[str, type] = {
    "image": str,
    "label": str,
    "predicted": str,
    "confidence": float,
    "wrong": bool,
}


class FailedTestError(Exception):
    """The user's test of a network has failed.

    The message has a line of the user's code, the type of the error and its text.
    """


def find_winner(
    evaluations: Sequence[Evaluation],
    confirmations: Sequence[Evaluation],
    objectives: Objectives = ONLY_LOSS,
) -> Evaluation | None:
    """Return the evaluation that a run recommends.

    If all planned confirmations have finished, it is the evaluation that `compare_confirmed` ranks
    first. Otherwise, it is the evaluation with the lowest loss. With several objectives, it is
    always on the Pareto front.

    Returns:
        The evaluation; None if no evaluation has succeeded.
    """
    confirmed = (
        compare_confirmed(confirmations)
        if all(evaluation.is_finished for evaluation in confirmations)
        else []
    )
    best = find_front(evaluations, objectives)
    candidates = {
        evaluation.trial: evaluation
        for evaluation in (best if objectives.is_multi_objective else evaluations)
    }
    first = next((entry for entry in confirmed if entry.trial in candidates), None)
    if first is not None and first.mean is not None:
        return candidates[first.trial]
    return next(iter(best), None)


def find_best_by(
    name: str, evaluations: Sequence[Evaluation], objectives: Objectives
) -> Evaluation | None:
    """Return the evaluation of the Pareto front that is best in one objective.

    Returns:
        The evaluation; the lowest loss decides between equal values. None if no evaluation has
        succeeded.

    Raises:
        UsageError: If the run has no such objective.
    """
    if name not in objectives.names:
        close = difflib.get_close_matches(name, objectives.names, n=1)
        hint = f". Did you mean {close[0]}?" if close else ""
        several = f"an objective of this run ({', '.join(map(make_printable, objectives.names))})"
        condition = (
            several if objectives.is_multi_objective else f"{LOSS}, the only objective of this run"
        )
        raise UsageError(f"--by must be {condition}, got {make_printable(name)}{hint}")
    index = objectives.names.index(name)
    return min(
        find_front(evaluations, objectives),
        key=lambda evaluation: objectives.compute_costs(evaluation.values)[index],
        default=None,
    )


def find_confirmed_entry(
    chosen: Evaluation, confirmations: Sequence[Evaluation]
) -> ConfirmedIndividual | None:
    """Return the entry for an evaluation in the result of `compare_confirmed`.

    Args:
        chosen: The evaluation of the search.

    Returns:
        The entry; None if the evaluation was not confirmed, or if some confirmations have not
        finished.
    """
    if not all(evaluation.is_finished for evaluation in confirmations):
        return None
    entries = compare_confirmed(confirmations)
    return next(
        (entry for entry in entries if entry.trial == chosen.trial and entry.mean is not None), None
    )


def run_winner_test(
    run_dir: RunDir,
    problem: Problem,
    winner: Evaluation,
    run_test: RunTest,
    confirmations: Sequence[Evaluation] = (),
) -> dict[str, Any] | None:
    """Test the network of the winner of a run on the test data, and write the result to test.json.

    Test data must not be used to choose a network. Otherwise, the result is too optimistic. Weights
    that an earlier session trained with other settings are not tested.

    Args:
        problem: The objective of the run and its test.
        winner: The evaluation that the run recommends. `find_network` chooses its network.
        run_test: The function that runs the test, such as `hpo.trainer.final_test.run_test`.

    Returns:
        The content of test.json; None without a test or suitable weights, or if this network was
        tested earlier.

    Raises:
        FailedTestError: If the test fails.
    """
    network = find_network(run_dir, winner, confirmations) if problem.file.has_test else None
    expected = (winner.params, run_dir.read_manifest().settings)
    if network is None or (network.info.params, network.info.settings) != expected:
        return None
    tested: dict[str, Any] = {"trial": winner.trial, "confirmation": network.info.confirmation}
    before = _read_test_json(run_dir)  # An earlier session may have tested another winner.
    if before is not None and tested.items() <= before.items():
        return None
    times = 1 + (before["times"] if before is not None else 0)
    content: dict[str, Any] | None = None
    for part in run_test(dict(winner.params), network.path.absolute()):
        if part["kind"] == "metrics":
            content = {
                **tested,
                "times": times,
                "metrics": _parse_metrics(part),
                "predictions": [],
                "texts": [],
            }
        elif part["kind"] == "samples" and content is not None:
            content |= _parse_samples(part)
        else:
            raise FailedTestError(part.get("text", "it gave no metrics"))
        write_json(run_dir.test_json, content)  # Written before the samples, which may fail.
    if content is None:
        raise FailedTestError("it gave no metrics")
    return content


def read_winner_test(run_dir: RunDir, winner: Evaluation) -> dict[str, Any] | None:
    """Return the result of the test of the winner; None if it was not tested.

    Args:
        winner: The evaluation that the run recommends.

    Returns:
        A dict with the `metrics`, `predictions` and `texts` of the test. `times` is the number of
        networks of this run that had been tested by then. `confirmation` is the confirmation trial
        that trained the network; None if the search trained it.
    """
    content = _read_test_json(run_dir)
    return content if content is not None and content["trial"] == winner.trial else None


def _read_test_json(run_dir: RunDir) -> dict[str, Any] | None:
    try:
        content = json.loads(run_dir.test_json.read_text(encoding="utf-8"))
        confirmation = content.get("confirmation")
        tested = {
            "trial": int(content["trial"]),
            "confirmation": None if confirmation is None else int(confirmation),
        }
        return {
            **tested,
            "times": int(content["times"]),
            "metrics": _parse_metrics(content),
            **_parse_samples(content),
        }
    except (
        OSError,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
        RecursionError,
    ):
        return None  # The file is missing, or a user has edited it.


def _parse_metrics(content: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(metric) for name, metric in content["metrics"].items()}


def _parse_samples(content: Mapping[str, Any]) -> dict[str, list[Any]]:
    predictions, texts = (
        content["predictions"][:MOST_PREDICTIONS],
        content.get("texts", [])[:MOST_TEXTS],
    )
    return {
        "predictions": [
            {name: kind(sample[name]) for name, kind in _SAMPLE_FIELDS.items()}
            for sample in predictions
        ],
        "texts": [shorten_text(str(sample["prompt"]), str(sample["text"])) for sample in texts],
    }
