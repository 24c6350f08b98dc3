"""Describe results in sentences and columns that tables, the report and `hpo watch` share."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpo.objectives import Objectives
from hpo.results.confirmation import ConfirmedIndividual, describe_margin, select_comparable
from hpo.results.cost import CONFIRMATIONS, Cost
from hpo.results.display_names import name_metrics, name_params
from hpo.results.hypervolume import Hypervolume
from hpo.results.reader import RunReader
from hpo.results.recommendation import find_confirmed_entry, find_network, read_winner_test
from hpo.results.summary import RungSummary, Summary
from hpo.store.evaluations import Evaluation, format_label
from hpo.store.pareto_front import compute_costs, select_far_apart
from hpo.store.weights import read_weights_trial
from hpo.text_format import (
    format_count,
    format_list,
    format_named_values,
    format_number,
    format_value,
    make_printable,
)
from hpo.views.tables import Columns

if TYPE_CHECKING:
    from hpo.results.models import PriorAgreement

_LEAST_HOURS = 0.1  # fewer are not shown
_MANY_HOURS = 10.0
_TOLERANCE = 0.02  # fraction of a loss; smaller differences are not mentioned
_METHOD = "95% confidence, Hsu's multiple comparisons with the best"
RESERVED_COLUMNS = ("loss", "trial", "island", "worker", "generation", "seconds")


def describe_front(count: int, objectives: Objectives) -> str:
    """Return a sentence with the meaning of a Pareto front of `count` individuals."""
    texts = objectives.describe()
    names = format_list(texts, len(texts))
    if count == 1:
        return f"1 individual: no other one is better in any of {names}."
    return f"{count} individuals: none of them is better than another in all of {names}."


def describe_hypervolume(hypervolume: Hypervolume | None, objectives: Objectives) -> str:
    """Return a sentence about the hypervolume that the front dominates; "" without one."""
    if hypervolume is None:
        return ""
    ideal = _format_point(hypervolume.ideal, objectives)
    reference = _format_point(hypervolume.reference, objectives)
    box = f"the box between {ideal} and {reference}"
    return f"Hypervolume: the front dominates {hypervolume.share:.1%} of {box}."


def _format_point(values: Iterable[float], objectives: Objectives) -> str:
    """Return the value of each objective as text, such as "loss 0.1, parameters 2000"."""
    named = zip(objectives.names, values, strict=True)
    return ", ".join(f"{name} {format_number(value)}" for name, value in named)


def select_front_rows(
    front: Sequence[Evaluation], objectives: Objectives, limit: int
) -> tuple[list[Evaluation], dict[int, int]]:
    """Return at most `limit` individuals of a front that are far apart, and their ties.

    The ties are, by trial, the number of others with equal values that were left out.
    """
    if len(front) <= limit:
        return list(front), {}
    first: dict[tuple[float, ...], Evaluation] = {}
    ties: Counter[int] = Counter()
    for evaluation in front:
        costs = objectives.compute_costs(evaluation.values)
        if costs in first:
            ties[first[costs].trial] += 1
        first.setdefault(costs, evaluation)
    distinct = list(first.values())
    positions = select_far_apart(compute_costs(distinct, objectives), limit)
    return [distinct[position] for position in positions], dict(ties)


def format_trial(trial: int, ties: Mapping[int, int]) -> str:
    """Return a trial as text: "7 +1" means that `select_front_rows` has left out an equal one."""
    return f"{trial} +{ties[trial]}" if ties.get(trial) else str(trial)


def name_columns(
    evaluations: Sequence[Evaluation],
    params: Iterable[str],
    objectives: Objectives,
    taken: Collection[str],
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the headings of metrics and of hyperparameters, which differ from those in `taken`.

    Metrics are sorted, first those that are objectives.
    """
    params = list(params)
    found = sorted({name for evaluation in evaluations for name in evaluation.metrics})
    metrics = _put_objectives_first(found, objectives)
    return name_metrics(metrics, params, taken), name_params(params, taken)


def _put_objectives_first(metrics: Collection[str], objectives: Objectives) -> list[str]:
    return list(dict.fromkeys([*(o for o in objectives.metric_names if o in metrics), *metrics]))


def make_improved_heading(objectives: Objectives) -> str:
    """Return the heading of the column that counts new best results by propagator."""
    return "joined the front" if objectives.is_multi_objective else "improved the best"


def describe_confirmed(summary: Summary) -> list[str]:
    """Return sentences that compare the confirmed individuals.

    They say which individuals may be the best, which are as good as the best, and how much the loss
    depends on the seed.
    """
    noise = summary.seed_noise
    names = [f"trial {entry.trial}" for entry in summary.confirmed]
    sentences = describe_comparison(summary.confirmed, summary.as_good_within, names)
    searched = {evaluation.trial: evaluation.loss for evaluation in summary.evaluations}
    confirmed = [entry for entry in summary.confirmed if entry.losses]
    is_repeated = all(searched.get(entry.trial) in entry.losses for entry in confirmed)
    if noise and noise.deviation == 0 and is_repeated:
        sentences.append(
            "The losses of each do not depend on the seed. If the training should, it does not use "
            "the seed, so nothing is confirmed."
        )
    elif noise and noise.deviation > 0:
        share = f"{noise.share:.0%}" if noise.share >= 0.005 else "less than 1%"
        sentences.append(f"The seed accounts for {share} of the variance of these losses.")
    return sentences


def describe_comparison(
    entries: Sequence[ConfirmedIndividual], margin: float | None, names: Sequence[str]
) -> list[str]:
    """Return sentences that compare individuals; `margin` as in `compute_margin`."""
    if not entries:
        return []
    if len(entries) == 1:
        return ["There is nothing to compare it with: --top-n 3 would confirm three."]
    if margin is None:
        others_failed = all(entry.failed > entries[0].failed for entry in entries[1:])
        reason = "All others failed more often" if others_failed else "There are too few losses"
        return [f"{reason}: nothing is compared with the best."]
    named = list(zip(names, entries, strict=True))
    candidates = [name for name, entry in named if entry.may_be_best]
    good = [name for name, entry in named if entry.as_good]
    compared = select_comparable(entries)
    alike = "" if len(compared) == len(entries) else " of those that failed as often"
    subject = _capitalize(format_list(candidates, len(candidates)))
    if len(candidates) == 1:
        sentences = [f"{subject} is the best{alike or ' of these'} ({_METHOD})."]
    else:
        rest = "" if len(candidates) == len(compared) else ", and no other one"
        sentences = [f"{subject} may be the best{alike}{rest} ({_METHOD})."]
    within = f"as good as the best within {describe_margin(entries, margin)}"
    if len(good) > 1:
        sentences.append(f"{_capitalize(format_list(good, len(good)))} are {within}.")
    elif not good:
        excess = entries[0].worse_by_at_most
        known = ""
        if excess is not None:
            known = f": {names[0]} may be worse by up to {format_number(excess)}"
        sentences.append(f"None is certain to be {within}{known}.")
    elif len(candidates) > 1:
        sentences.append(f"Only {good[0]} is certain to be {within}.")
    return sentences


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


def format_expected_loss(summary: Summary) -> str:
    """Return a sentence with the loss that a model expects of the best trial; empty without it.

    If the model expects a lower loss of another trial, the sentence also names that trial.
    """
    expected = summary.expected_loss
    if expected is None or summary.best is None:
        return ""
    loss = summary.best.loss
    text = (
        f"A model of {expected.evaluations} losses predicts {format_number(expected.loss)} for "
        f"trial {expected.trial}"
    )
    if expected.loss - loss > _TOLERANCE * abs(loss):
        text += f": its own loss, {format_number(loss)}, may be partly luck"
    if expected.loss - expected.lowest_loss > _TOLERANCE * abs(expected.lowest_loss):
        lowest = format_number(expected.lowest_loss)
        text += f". Its lowest prediction is {lowest}, for trial {expected.lowest_trial}"
    return f"{text}."


def make_prior_columns(priors: Sequence[PriorAgreement]) -> Columns:
    """Return the columns of a table with one row per prior."""
    return [
        ("hyperparameter", [prior.name for prior in priors]),
        ("prior", [format_value(prior.value) for prior in priors]),
        ("confidence", [prior.confidence for prior in priors]),
        ("correlation", [_format_correlation(prior.correlation) for prior in priors]),
        ("evaluations", [prior.verdict for prior in priors]),
    ]


def _format_correlation(value: float | None) -> str:
    return "" if value is None else f"{round(value, 2) + 0.0:.2f}"


def make_rung_columns(rungs: Sequence[RungSummary]) -> Columns:
    """Return the columns of a table with one row per rung."""
    columns = [
        ("rung", [str(rung.epochs) for rung in rungs]),
        ("reached", [str(rung.reached) for rung in rungs]),
        ("continued", [str(rung.continued) for rung in rungs]),
        ("paused", [str(rung.paused) for rung in rungs]),
        ("best", ["" if rung.best is None else format_number(rung.best) for rung in rungs]),
    ]
    if any(rung.pruned for rung in rungs):
        columns.insert(4, ("pruned", [str(rung.pruned) for rung in rungs]))
    if any(rung.next is not None for rung in rungs):
        columns.append(("next promotion", [_format_next_promotion(rung) for rung in rungs]))
    if len({rung.bracket for rung in rungs}) > 1:
        columns.insert(0, ("bracket", [str(rung.bracket) for rung in rungs]))
    return columns


def format_cost(cost: Cost) -> str:
    """Return the hours of GPUs, or of ranks without GPUs, as text; "" for less than 0.1 h."""
    name, hours = ("GPU", cost.gpu_hours) if cost.gpu_hours else ("rank", cost.rank_hours)
    total = sum(hours.values())
    if total < _LEAST_HOURS:
        return ""
    digits = 1 if total >= _MANY_HOURS else 3
    parts = ", ".join(f"{value:.{digits}f} {outcome}" for outcome, value in hours.items())
    again = total - hours.get(CONFIRMATIONS, 0.0)
    return (
        f"{total:.{digits}f} {name} hours in all sessions: {parts}; as many evaluations again "
        f"would take about {again:.{digits}f}"
    )


def _format_next_promotion(rung: RungSummary) -> str:
    """Return which paused trial of a rung is promoted next, and when; "" if none is paused."""
    first = rung.next
    if first is None:
        return ""
    loss = "" if first.loss is None else f", {format_number(first.loss)}"
    candidate = f"trial {first.trial}{loss}"
    if first.count_needed is None:
        return f"{candidate}: never"
    if first.count_needed <= rung.reached:
        return f"{candidate}: now"
    return f"{candidate}: after {first.count_needed} have reached it"


def describe_winner(run: RunReader, chosen: Evaluation, objective: str | None = None) -> list[str]:
    """Return lines about the results of the best individual and the location of its weights.

    The user may have chosen it by an `objective`.
    """
    objectives = run.manifest.objectives
    test = read_winner_test(run.run_dir, chosen)
    names = name_metrics(chosen.metrics, chosen.params, RESERVED_COLUMNS)
    metrics = {
        names[name]: chosen.metrics[name]
        for name in _put_objectives_first(chosen.metrics, objectives)
    }
    first = f"trial {chosen.trial}: {format_named_values({'loss': chosen.loss, **metrics})}"
    entry = find_confirmed_entry(chosen, run.read_confirmations())
    lines = [f"{first} in the search", _format_confirmation(entry)] if entry else [first]
    if objectives.is_multi_objective and objective is None:
        count = len(run.find_front())
        ways = " or ".join(f"--by {shlex.quote(name)}" for name in objectives.metric_names)
        lines.append(f"{count} individuals are on the front: {ways} chooses another")
        if count == 1:
            lines[-1] = "it alone is on the front"
    if test:
        weights = ""
        if test["confirmation"] is not None:
            weights = f", with the weights of {format_label(test['confirmation'], True)}"
        lines.append(f"on test data{weights}: {format_named_values(test['metrics'])}")
    lines += _format_weights(run, chosen)
    return list(map(make_printable, lines))


def format_test_result(run: RunReader, winner: Evaluation, content: Mapping[str, Any]) -> list[str]:
    """Return lines about the test of the winner's network: its metrics, and which network."""
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
