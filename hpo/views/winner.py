"""The individual that a run recommends: how good it is, and which of its networks was tested."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hpo.results.names import metrics_shown
from hpo.results.network import Network, network_of
from hpo.results.reader import RunReader
from hpo.results.winner import confirmed_entry, examined
from hpo.store.evaluations import Evaluation, label
from hpo.store.weights import trial_of_weights
from hpo.text import counted, named, number, printable
from hpo.views.front import objectives_first, others_of_it
from hpo.views.tables import OWN_COLUMNS


def print_winner(run: RunReader, chosen: Evaluation, by: str | None = None) -> None:
    """Print on stderr how good the best individual is, and where its weights are; `by` says in what it is the best."""
    objectives, test = run.manifest.objectives, examined(run.run_dir, chosen)
    names = metrics_shown(chosen.metrics, chosen.params, OWN_COLUMNS)
    metrics = {names[name]: chosen.metrics[name] for name in objectives_first(chosen.metrics, objectives)}
    first = f"trial {chosen.trial}: {named({'loss': chosen.loss, **metrics})}"
    entry = confirmed_entry(chosen, run.confirmations())
    lines = [f"{first} in the search", _confirmed(entry)] if entry else [first]
    if objectives.are_several and by is None:
        lines.append(others_of_it(run.front(), objectives))
    if test:
        other = "" if test["confirmation"] is None else f", with the weights of {label(test['confirmation'], True)}"
        lines.append(f"on test data{other}: {named(test['metrics'])}")
    lines += _weights(run, chosen)
    print(*map(printable, lines), sep="\n", file=sys.stderr)


def tested_lines(run: RunReader, winner: Evaluation, content: Mapping[str, Any]) -> list[str]:
    """Return which network was tested, and what came out; and why this one, if other seeds have decided."""
    metrics = ", ".join(f"{printable(name)} {number(value)}" for name, value in content["metrics"].items())
    network = network_of(run.run_dir, winner, run.confirmations(all_plans=True))
    name = network.name if network else f"trial {winner.trial}"
    lines = [f"On test data, which the search has not seen, the network of {name} has {metrics}"]
    if network and confirmed_entry(winner, run.confirmations()):
        loss = number(network.trained_by.loss)
        lines.append(
            f"Trial {winner.trial} has the lowest mean loss over other seeds. Of its networks, the one with the lowest "
            f"validation loss, {loss}, was tested: {network.path}"
        )
    return lines


def untested_line(run: RunReader, winner: Evaluation) -> str:
    """Return why the winner's network was not tested; empty if no weights are kept, or it was tested before."""
    kept = trial_of_weights(run.run_dir.weights)
    network = network_of(run.run_dir, winner, run.confirmations(all_plans=True))
    if kept is None or (network and network.about.settings == run.manifest.settings):
        return ""
    if network:
        return f"No network was tested: the weights of trial {winner.trial} were trained with other settings"
    why = "the lowest mean loss over other seeds" if confirmed_entry(winner, run.confirmations()) else "the lowest loss"
    return (
        f"No network was tested: trial {winner.trial} has {why}, but no weights of it are kept; those of trial {kept} "
        f"are in {run.run_dir.weights}"
    )


def _confirmed(entry: Mapping[str, Any]) -> str:
    seeds = counted(len(entry["losses"]), "other seed")
    deviation = "" if entry["deviation"] is None else f", standard deviation {number(entry['deviation'])}"
    failed = f"; {entry['failed']} failed" if entry["failed"] else ""
    return f"trained again with {seeds}: mean loss {number(entry['mean'])}{deviation}{failed}"


def _weights(run: RunReader, chosen: Evaluation) -> Sequence[str]:
    """Return a line that says where an individual's weights are, or whose there are; none without any."""
    network = network_of(run.run_dir, chosen, run.confirmations(all_plans=True))
    if network:
        return [f"its weights: {network.path}{_origin(network)}"]
    kept = trial_of_weights(run.run_dir.weights)
    return [] if kept is None else [f"the weights of trial {kept}: {run.run_dir.weights}"]


def _origin(network: Network) -> str:
    one = network.trained_by
    return "" if one.confirms is None else f" (seed {one.seed}, loss {number(one.loss)})"
