"""What came out of a run: counts, the best individuals, and how busy the workers were."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hpo.objectives import ONLY_LOSS, Objectives
from hpo.results.confirmation import compare_confirmed, compute_margin, estimate_seed_noise
from hpo.results.hypervolume import summarize_hypervolume
from hpo.results.search_history import find_front_additions, find_improvements, sort_by_end
from hpo.store.elastic_candidates import find_help_periods
from hpo.store.evaluations import Evaluation, group_by_individual
from hpo.store.inheritance import trace_lineage
from hpo.store.pareto_front import find_front, select_top
from hpo.store.successive_halving import HALVING_SCHEDULES, HalvingSchedule, Rung, compute_rungs

if TYPE_CHECKING:
    from hpo.space import SearchSpace
    from hpo.store.manifest import Manifest

_NO_MODEL_RESULTS: dict[str, Any] = {"expected": None, "importances": []}
# The states that are counted: not those of what is repeated, or waits.
COUNTED_STATES = ("complete", "pruned", "paused", "failed", "running")


def summarize(
    evaluations: Sequence[Evaluation],
    run: Manifest,
    top_n: int,
    confirmations: Sequence[Evaluation] = (),
    ask_models: bool = True,
) -> dict[str, Any]:
    """Return what the record says of a run: the content of summary.json without its times.

    Models take seconds if there are many hyperparameters, so a run that is being stopped does not ask them.
    """
    objectives = run.objectives
    best, confirmed = find_front(evaluations, objectives), compare_confirmed(confirmations)
    first = best[0] if best else None
    all_individuals = [*group_by_individual(evaluations).values(), *group_by_individual(confirmations).values()]
    islands = sorted({evaluation.island for evaluation in evaluations if evaluation.is_finished})
    return {
        "evaluations": count_by_state(evaluations, run.budget),
        "waiting": sum(evaluation.state == "waiting" for evaluation in evaluations),
        "failures": summarize_failures([*evaluations, *confirmations]),
        "propagators": summarize_propagators(evaluations, objectives),
        "rungs": summarize_rungs(evaluations, run.pruner, objectives),
        "lineage": summarize_lineage(evaluations, first),
        "best": _make_entry(first) if first else None,
        "top": [_make_entry(evaluation) for evaluation in select_top(evaluations, top_n, objectives)],
        "objectives": list(objectives.names),
        "maximized": list(objectives.maximized),
        "front": [_make_entry(evaluation) for evaluation in best] if objectives.is_multi_objective else [],
        "hypervolume": summarize_hypervolume(evaluations, objectives),
        **(_ask_models(evaluations, run, first) if ask_models else _NO_MODEL_RESULTS),
        "islands": [
            {
                "island": island,
                "top": [
                    _make_entry(e)
                    for e in select_top([e for e in evaluations if e.island == island], top_n, objectives)
                ],
            }
            for island in islands
        ],
        "grown": sum(any(one.worker_groups for one in group) for group in all_individuals),
        "taken_over": sum(bool(evaluation.imported_from) for evaluation in evaluations),
        "confirmed": [{**_make_entry(evaluations[entry["trial"]]), **entry} for entry in confirmed],
        "as_good_within": compute_margin(confirmed),
        "seed_noise": estimate_seed_noise(confirmed),
        "unconfirmed": sum(evaluation.state in ("waiting", "running") for evaluation in confirmations),
    }


def _ask_models(evaluations: Sequence[Evaluation], run: Manifest, best: Evaluation | None) -> dict[str, Any]:
    """Return what models say: the expected loss of the best, and the importances of hyperparameters.

    Both leave out evaluations that inherit: their losses do not follow from their hyperparameters alone.
    """
    from hpo.results.genes import read_space  # imports numpy, which ranks without a worker to lead do not need

    try:
        space = read_space(run.space)
        return {
            "expected": _predict_best(evaluations, run, best, space),
            "importances": _summarize_importances(evaluations, run),
        }
    except ValueError:  # run.json was edited
        return _NO_MODEL_RESULTS


def _predict_best(
    evaluations: Sequence[Evaluation], run: Manifest, best: Evaluation | None, space: SearchSpace
) -> dict[str, Any] | None:
    """Return the loss that a model expects of the best, and of whom it expects the lowest; None if it cannot say."""
    from hpo.results.expected_loss import (
        compute_expected_losses,  # scipy, which takes 0.1 s, and only the first rank needs
    )

    can_say = best and not run.objectives.is_multi_objective
    losses = compute_expected_losses(evaluations, space) if can_say else {}
    if not best or best.trial not in losses:
        return None
    lowest = min(losses, key=lambda trial: (losses[trial], trial))
    return {
        "trial": best.trial,
        "loss": losses[best.trial],
        "evaluations": len(losses),
        "lowest": {"trial": lowest, "loss": losses[lowest]},
    }


def _summarize_importances(evaluations: Sequence[Evaluation], run: Manifest) -> list[dict[str, Any]]:
    from hpo.results.importances import compute_importances  # imports scipy, as `_expected` does

    return [
        {"name": one.name, "share": one.share, "low": one.low, "high": one.high, "told_apart": one.is_significant}
        for one in compute_importances(evaluations, run.space)
    ]


def summarize_failures(evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """Return the reasons of failures, the most frequent first, with their counts and the latest trial of each.

    `confirms` is the trial that the latest trial confirms; None where it is a trial of the search. `has_traceback`
    tells whether a traceback of the latest trial was recorded.
    """
    counted = []
    for reason, group in group_by_reason(evaluations):
        latest = max(group, key=lambda one: (one.ended, one.trial))
        about = {"trial": latest.trial, "confirms": latest.confirms, "has_traceback": bool(latest.traceback)}
        counted.append({"reason": reason, "count": len(group), **about})
    return counted


def group_by_reason(evaluations: Sequence[Evaluation]) -> list[tuple[str, list[Evaluation]]]:
    """Return the evaluations that failed, grouped by their reasons, the most frequent reason first."""
    groups: dict[str, list[Evaluation]] = {}
    for evaluation in evaluations:
        if evaluation.state == "failed":
            groups.setdefault(format_reason(evaluation), []).append(evaluation)
    return sorted(groups.items(), key=lambda item: -len(item[1]))


def format_reason(failed: Evaluation) -> str:
    """Return where and why an evaluation failed, on whichever rank it was: the place first, if it is known."""
    return re.sub(r"^rank \d+[:,] ", "", failed.failure or "")


def summarize_propagators(evaluations: Sequence[Evaluation], objectives: Objectives) -> list[dict[str, Any]]:
    """Return for each propagator its evaluations, how many of them improved the best so far, and its own best loss.

    Where there are several objectives, an evaluation improves the best if it joins the front.
    """
    found: dict[str, dict[str, Any]] = {}
    for evaluation in sort_by_end(evaluations):
        entry = found.setdefault(
            evaluation.propagator, {"propagator": evaluation.propagator, "evaluations": 0, "improved": 0, "best": None}
        )
        entry["evaluations"] += 1
        if evaluation.state == "complete" and (entry["best"] is None or evaluation.loss < entry["best"]):
            entry["best"] = evaluation.loss
    better = (
        find_front_additions(evaluations, objectives)
        if objectives.is_multi_objective
        else find_improvements(evaluations)
    )
    for evaluation in better:
        found[evaluation.propagator]["improved"] += 1
    return list(found.values())


def summarize_lineage(evaluations: Sequence[Evaluation], best: Evaluation | None) -> list[dict[str, Any]]:
    """Return the line of the best, from the first of whom it inherits to itself; empty where it inherits nothing."""
    line = trace_lineage(best, {one.trial: one for one in evaluations}) if best else []
    entries = [{"trial": e.trial, "epochs": len(e.curve), "loss": e.loss, "params": e.params} for e in line]
    return entries if len(entries) > 1 else []


def summarize_rungs(
    evaluations: Sequence[Evaluation], pruner: str, objectives: Objectives = ONLY_LOSS
) -> list[dict[str, Any]]:
    """Return the rungs of a pruner that pauses, with what has reached them; `next` is the paused one to go on first.

    It goes on when `at` individuals have reached its rung, if none of those that are to come is better.
    """
    halving = HALVING_SCHEDULES.get(pruner)
    if halving is None:
        return []
    return [
        {
            "bracket": rung.bracket,
            "epochs": rung.epochs,
            "reached": len(rung.losses),
            "went_on": len(rung.continued),
            "paused": len(rung.paused),
            "best": rung.losses[0][0] if math.isfinite(rung.losses[0][0]) else None,
            "next": _describe_next(halving, rung),
        }
        for rung in compute_rungs(halving, evaluations, objectives)
    ]


def _describe_next(halving: HalvingSchedule, rung: Rung) -> dict[str, Any] | None:
    if rung.next_paused is None:
        return None
    place, evaluation = rung.next_paused
    known = evaluation.loss if math.isfinite(evaluation.loss) else None
    return {"trial": evaluation.trial, "loss": known, "at": halving.count_needed(place)}


def count_by_state(evaluations: Sequence[Evaluation], budget: int) -> dict[str, int]:
    """Return the number of evaluations by state, without interrupted ones, which are repeated, and taken over ones."""
    states = Counter(evaluation.state for evaluation in evaluations if not evaluation.imported_from)
    return {**{state: states[state] for state in COUNTED_STATES}, "budget": budget}


def compute_busy_fraction(evaluations: Sequence[Evaluation], workers: int, since: float) -> float | None:
    """Return the share of the workers' time spent in evaluations, from the first one's start to the last one's end.

    It counts for each of the workers that are at an evaluation.

    Only evaluations that were started at `since` (seconds since the epoch) or later, by this session of a run, count;
    None where there are none, or the clock was set meanwhile.
    """
    ours = [one for one in evaluations if one.has_ended and not one.imported_from and one.started >= since]
    if not ours:
        return None
    span = max(evaluation.ended for evaluation in ours) - min(evaluation.started for evaluation in ours)
    if span < 0:
        return None
    seconds = [one.seconds - one.seconds_before for one in ours]  # of this session
    busy = sum(one for one in seconds if not math.isnan(one))
    busy += sum(part.stop - part.start for one in ours for part in find_help_periods(one, one.ended))
    return round(min(1.0, busy / (workers * span)), 4) if span else 1.0


def _make_entry(evaluation: Evaluation) -> dict[str, Any]:
    return {
        "trial": evaluation.trial,
        "loss": evaluation.loss,
        "params": evaluation.params,
        "island": evaluation.island,
        "worker": evaluation.worker,
        "generation": evaluation.generation,
        "seconds": None if math.isnan(evaluation.seconds) else evaluation.seconds,
        "metrics": evaluation.metrics,
        "origin": evaluation.imported_from,
        "inherits": evaluation.inherits,
    }
