"""Select the evaluation that a run recommends, find its saved network, and test this network.

The test uses data that the search has not used. The planned confirmations are the trainings with
other seeds that the latest session requires.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpo.errors import UsageError
from hpo.objectives import ONLY_LOSS, Objectives
from hpo.prediction import MOST_PREDICTIONS, MOST_TEXTS, shorten_text
from hpo.problem import Problem
from hpo.results.confirmation import ConfirmedIndividual, compare_confirmed
from hpo.store.evaluations import Evaluation
from hpo.store.pareto_front import find_front
from hpo.store.run_dir import RunDir, write_json
from hpo.store.weights import (
    Weights,
    find_weights,
    make_weights_path,
    read_weights,
    read_weights_trial,
)

RunTest = Callable[[dict[str, Any], Path], Iterator[Mapping[str, Any]]]
"""Function that tests the network with these hyperparameters and weights.

It yields the parts of the result.
"""

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
    """
    front = find_front(evaluations, objectives)
    candidates = front if objectives.is_multi_objective else evaluations
    by_trial = {evaluation.trial: evaluation for evaluation in candidates}
    confirmed = [entry for entry in _compare_finished(confirmations) if entry.trial in by_trial]
    if confirmed and confirmed[0].mean is not None:
        return by_trial[confirmed[0].trial]
    return next(iter(front), None)


def _compare_finished(confirmations: Sequence[Evaluation]) -> list[ConfirmedIndividual]:
    """Return the confirmed individuals, best first; none unless all confirmations have ended."""
    is_finished = all(evaluation.is_finished for evaluation in confirmations)
    return compare_confirmed(confirmations) if is_finished else []


def find_confirmed_entry(
    chosen: Evaluation, confirmations: Sequence[Evaluation]
) -> ConfirmedIndividual | None:
    """Return the entry for an evaluation in the result of `compare_confirmed`.

    Return None if it was not confirmed, or if some confirmations have not finished.
    """
    entries = _compare_finished(confirmations)
    return next((e for e in entries if e.trial == chosen.trial and e.mean is not None), None)


@dataclass(frozen=True)
class TrainedNetwork:
    """A network whose weights were saved in the file `path`, with their description."""

    path: Path
    info: Weights
    trained_by: Evaluation
    """The evaluation that has trained the network, of the search or of a confirmation."""

    @property
    def name(self) -> str:
        """The text to show: the trial, with the seed if a confirmation has trained the network."""
        name = f"trial {self.info.trial}"
        if self.trained_by.confirms is not None:
            name += f" with seed {self.trained_by.seed} ({self.trained_by.label})"
        return name


def find_network(
    run_dir: RunDir, chosen: Evaluation, confirmations: Sequence[Evaluation]
) -> TrainedNetwork | None:
    """Return the saved network of an individual, which the search or a confirmation has trained.

    If there are several, return the network with the lowest loss. Networks that were trained with
    the current settings of the run are preferred. Weights that cannot be read are ignored.
    """
    paths = [find_weights(run_dir, chosen.trial)]
    confirmed = make_weights_path(run_dir.confirmed_weights, chosen.trial)
    if read_weights_trial(confirmed) == chosen.trial:
        paths.append(confirmed)
    found: list[TrainedNetwork] = []
    for path in filter(None, paths):
        info = None
        with suppress(UsageError):
            info = read_weights(path, with_tensors=False)
        if info is None:
            continue
        trained_by = [chosen]
        if info.confirmation is not None:
            trained_by = [e for e in confirmations if e.trial == info.confirmation]
        found += [TrainedNetwork(path, info, evaluation) for evaluation in trained_by]
    settings = run_dir.read_manifest().settings
    return min(
        found,
        key=lambda network: (network.info.settings != settings, network.trained_by.loss),
        default=None,
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
    that an earlier session trained with other settings are not tested. `run_test` is a function
    such as `hpo.trainer.final_test.run_test`.

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

    It has the `metrics`, `predictions` and `texts` of the test. `times` is the number of networks
    of this run that had been tested by then. `confirmation` is the confirmation trial that trained
    the network; None if the search trained it.
    """
    content = _read_test_json(run_dir)
    return content if content is not None and content["trial"] == winner.trial else None


def _read_test_json(run_dir: RunDir) -> dict[str, Any] | None:
    try:
        content = json.loads(run_dir.test_json.read_text(encoding="utf-8"))
        confirmation = content.get("confirmation")
        return {
            "trial": int(content["trial"]),
            "confirmation": None if confirmation is None else int(confirmation),
            "times": int(content["times"]),
            "metrics": _parse_metrics(content),
            **_parse_samples(content),
        }
    except OSError:
        return None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
        return None  # A user has edited the file.


def _parse_metrics(content: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(metric) for name, metric in content["metrics"].items()}


def _parse_samples(content: Mapping[str, Any]) -> dict[str, list[Any]]:
    predictions = content["predictions"][:MOST_PREDICTIONS]
    texts = content.get("texts", [])[:MOST_TEXTS]
    return {
        "predictions": [
            {name: kind(sample[name]) for name, kind in _SAMPLE_FIELDS.items()}
            for sample in predictions
        ],
        "texts": [shorten_text(str(sample["prompt"]), str(sample["text"])) for sample in texts],
    }
