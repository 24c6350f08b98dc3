"""Describe the individual that a run recommends, its test result, and where its weights are."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hpo.objectives import Objectives
from hpo.results.confirmation import ConfirmedIndividual
from hpo.results.display_names import name_metrics
from hpo.results.reader import RunReader
from hpo.results.recommendation import find_confirmed_entry, find_network, read_winner_test
from hpo.store.evaluations import Evaluation, format_label
from hpo.store.weights import read_weights_trial
from hpo.text_format import format_count, format_named_values, format_number, make_printable
from hpo.views.result_text import put_objectives_first
from hpo.views.summary_tables import RESERVED_COLUMNS


def print_winner(run: RunReader, chosen: Evaluation, objective: str | None = None) -> None:
    """Print the results of the best individual and the location of its weights to stderr.

    Args:
        objective: Name of the objective by which the user has chosen the individual; None if by no
            objective.
    """
    objectives, test = run.manifest.objectives, read_winner_test(run.run_dir, chosen)
    names = name_metrics(chosen.metrics, chosen.params, RESERVED_COLUMNS)
    metrics = {
        names[name]: chosen.metrics[name]
        for name in put_objectives_first(chosen.metrics, objectives)
    }
    first = f"trial {chosen.trial}: {format_named_values({'loss': chosen.loss, **metrics})}"
    entry = find_confirmed_entry(chosen, run.read_confirmations())
    lines = [f"{first} in the search", _format_confirmation(entry)] if entry else [first]
    if objectives.is_multi_objective and objective is None:
        lines.append(_describe_alternatives(len(run.find_front()), objectives))
    if test:
        weights = ""
        if test["confirmation"] is not None:
            weights = f", with the weights of {format_label(test['confirmation'], True)}"
        lines.append(f"on test data{weights}: {format_named_values(test['metrics'])}")
    lines += _format_weights(run, chosen)
    print(*map(make_printable, lines), sep="\n", file=sys.stderr)


def _describe_alternatives(count: int, objectives: Objectives) -> str:
    """Return which options choose another individual of a front of `count` individuals."""
    if count == 1:
        return "it alone is on the front"
    ways = " or ".join(f"--by {shlex.quote(name)}" for name in objectives.metric_names)
    return f"{format_count(count, 'individual')} are on the front: {ways} chooses another"


def format_test_result(run: RunReader, winner: Evaluation, content: Mapping[str, Any]) -> list[str]:
    """Return lines about the test of the winner's network: its metrics, and which network.

    Args:
        winner: The individual that the run recommends.
        content: Result of the test, with its `metrics`.
    """
    metrics = ", ".join(
        f"{make_printable(name)} {format_number(value)}"
        for name, value in content["metrics"].items()
    )
    network = find_network(run.run_dir, winner, run.read_confirmations(all_plans=True))
    name = network.name if network else f"trial {winner.trial}"
    lines = [f"On test data, which the search has not seen, the network of {name} has {metrics}"]
    if network and find_confirmed_entry(winner, run.read_confirmations()):
        loss = format_number(network.trained_by.loss)
        lines.append(
            f"Trial {winner.trial} has the lowest mean loss over other seeds. Of its networks, "
            f"the one with the lowest validation loss, {loss}, was tested: {network.path}"
        )
    return lines


def explain_missing_test(run: RunReader, winner: Evaluation) -> str:
    """Return why the winner's network was not tested.

    Return "" if no weights were saved, or if it was tested earlier.
    """
    kept = read_weights_trial(run.run_dir.best_weights)
    network = find_network(run.run_dir, winner, run.read_confirmations(all_plans=True))
    if kept is None or (network and network.info.settings == run.manifest.settings):
        return ""
    if network:
        reason = f"the weights of trial {winner.trial} were trained with other settings"
        return f"No network was tested: {reason}"
    why = "the lowest loss"
    if find_confirmed_entry(winner, run.read_confirmations()):
        why = "the lowest mean loss over other seeds"
    return (
        f"No network was tested: trial {winner.trial} has {why}, but no weights of it are kept; "
        f"those of trial {kept} are in {run.run_dir.best_weights}"
    )


def _format_confirmation(entry: ConfirmedIndividual) -> str:
    assert entry.mean is not None  # `find_confirmed_entry` returns no other entry.
    seeds = format_count(len(entry.losses), "other seed")
    deviation = ""
    if entry.deviation is not None:
        deviation = f", standard deviation {format_number(entry.deviation)}"
    failed = f"; {entry.failed} failed" if entry.failed else ""
    return f"trained again with {seeds}: mean loss {format_number(entry.mean)}{deviation}{failed}"


def _format_weights(run: RunReader, chosen: Evaluation) -> Sequence[str]:
    """Return a line with the path of the individual's weights, or of the weights that are kept."""
    network = find_network(run.run_dir, chosen, run.read_confirmations(all_plans=True))
    if network:
        trained_by = network.trained_by
        seed = f" (seed {trained_by.seed}, loss {format_number(trained_by.loss)})"
        return [f"its weights: {network.path}{'' if trained_by.confirms is None else seed}"]
    kept = read_weights_trial(run.run_dir.best_weights)
    return [] if kept is None else [f"the weights of trial {kept}: {run.run_dir.best_weights}"]
