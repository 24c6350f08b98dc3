"""Summarize a run: counts, the best individuals, and how busy the workers were.

A session is one start of the run. The latest session plans confirmations.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hpo.objectives import ONLY_LOSS, Objectives
from hpo.results.confirmation import compare_confirmed, compute_margin, estimate_seed_noise
from hpo.results.failure_reasons import summarize_failures
from hpo.results.hypervolume import summarize_hypervolume
from hpo.results.search_history import find_front_additions, find_improvements
from hpo.store.evaluations import Evaluation, sort_by_end
from hpo.store.inheritance import trace_lineage
from hpo.store.pareto_front import find_front, select_top
from hpo.store.pruning import HALVING_SCHEDULES, HalvingSchedule, Rung, compute_rungs

if TYPE_CHECKING:
    from hpo.space import SearchSpace
    from hpo.store.manifest import Manifest

_NO_MODEL_RESULTS: dict[str, Any] = {"expected": None, "importances": []}
# Interrupted evaluations are retried, and waiting ones are counted separately.
COUNTED_STATES = ("complete", "pruned", "paused", "failed", "running")


def summarize(
    evaluations: Sequence[Evaluation],
    run: Manifest,
    top_n: int,
    confirmations: Sequence[Evaluation] = (),
    ask_models: bool = True,
) -> dict[str, Any]:
    """Return a summary of a run: the content of summary.json that follows from its evaluations.

    Args:
        run: The content of run.json.
        top_n: The number of best evaluations to list.
        ask_models: Whether to compute the expected loss of the best evaluation and the importances. They take seconds
            if there are many hyperparameters, so a run that is being stopped leaves them out.
    """
    objectives = run.objectives
    best, confirmed = find_front(evaluations, objectives), compare_confirmed(confirmations)
    first = best[0] if best else None
    islands = sorted({evaluation.island for evaluation in evaluations if evaluation.is_finished})
    return {
        "evaluations": count_by_state(evaluations, run.budget),
        "waiting": sum(evaluation.state == "waiting" for evaluation in evaluations),
        "failures": summarize_failures([*evaluations, *confirmations]),
        "priors": _summarize_priors(evaluations, run) if run.priors else [],
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
        "taken_over": sum(bool(evaluation.imported_from) for evaluation in evaluations),
        "confirmed": [{**_make_entry(evaluations[entry["trial"]]), **entry} for entry in confirmed],
        "as_good_within": compute_margin(confirmed),
        "seed_noise": estimate_seed_noise(confirmed),
        "unconfirmed": sum(evaluation.state in ("waiting", "running") for evaluation in confirmations),
    }


def _summarize_priors(evaluations: Sequence[Evaluation], run: Manifest) -> list[dict[str, Any]]:
    from hpo.results.prior_agreement import compare_priors  # Imports numpy, which only leaders need.

    try:
        return [vars(prior) for prior in compare_priors(evaluations, run.space, run.priors, run.objectives)]
    except ValueError:  # A user has edited run.json.
        return []


def _ask_models(evaluations: Sequence[Evaluation], run: Manifest, best: Evaluation | None) -> dict[str, Any]:
    """Return the expected loss of the best evaluation, and the importances of hyperparameters."""
    from hpo.results.genes import read_space  # Imports numpy, which only leaders need.

    try:
        space = read_space(run.space)
        return {
            "expected": _predict_best(evaluations, run, best, space),
            "importances": _summarize_importances(evaluations, run),
        }
    except ValueError:  # A user has edited run.json.
        return _NO_MODEL_RESULTS


def _predict_best(
    evaluations: Sequence[Evaluation], run: Manifest, best: Evaluation | None, space: SearchSpace
) -> dict[str, Any] | None:
    """Return the expected loss of the best evaluation, and the lowest expected loss of all evaluations.

    Return None if the model cannot predict the best evaluation.
    """
    # Imports scipy, which takes 0.1 s and which only the first rank needs.
    from hpo.results.expected_loss import compute_expected_losses

    is_predictable = best and not run.objectives.is_multi_objective
    losses = compute_expected_losses(evaluations, space) if is_predictable else {}
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
    from hpo.results.importances import compute_importances  # Imports scipy.

    return [
        {
            "name": importance.name,
            "share": importance.share,
            "low": importance.low,
            "high": importance.high,
            "told_apart": importance.is_significant,
        }
        for importance in compute_importances(evaluations, run.space)
    ]


def summarize_propagators(evaluations: Sequence[Evaluation], objectives: Objectives) -> list[dict[str, Any]]:
    """Return the results of each propagator.

    Returns:
        One dict for each propagator: its name, the number of its `evaluations`, the number of them that `improved` the
        best result, and its `best` loss. For several objectives, joining the Pareto front is an improvement.
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
    """Return the best evaluation and its ancestors as dicts, the oldest first; empty without ancestors.

    The ancestors are its parent (the evaluation from whose checkpoint it started), the parent of its parent, and so on.
    """
    lineage = trace_lineage(best, {evaluation.trial: evaluation for evaluation in evaluations}) if best else []
    entries = [{"trial": e.trial, "epochs": len(e.curve), "loss": e.loss, "params": e.params} for e in lineage]
    return entries if len(entries) > 1 else []


def summarize_rungs(
    evaluations: Sequence[Evaluation], pruner: str, objectives: Objectives = ONLY_LOSS
) -> list[dict[str, Any]]:
    """Return the rungs of a pruner that pauses evaluations; empty for others.

    Returns:
        One dict for each rung, with counts of the evaluations that have reached it. `next` describes the paused
        evaluation to promote next; None if there is none. Its `at` is the number of individuals that must first reach
        the rung, assuming that none of them is better.
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
    position, evaluation = rung.next_paused
    loss = evaluation.loss if math.isfinite(evaluation.loss) else None
    return {"trial": evaluation.trial, "loss": loss, "at": halving.count_needed(position)}


def count_by_state(evaluations: Sequence[Evaluation], budget: int) -> dict[str, int]:
    """Return the number of evaluations in each state, and the budget. Imported evaluations are left out."""
    states = Counter(evaluation.state for evaluation in evaluations if not evaluation.imported_from)
    return {**{state: states[state] for state in COUNTED_STATES}, "budget": budget}


def compute_busy_fraction(evaluations: Sequence[Evaluation], workers: int, since: float) -> float | None:
    """Return the share of time that workers spent in evaluations, between the first start and the last end.

    Args:
        since: The start of the session in seconds since the epoch. Earlier evaluations are ignored.

    Returns:
        The share, from 0 to 1. None if no evaluation has ended, or if the clock was set back during the session.
    """
    ours = [e for e in evaluations if e.has_ended and not e.imported_from and e.started >= since]
    if not ours:
        return None
    span = max(evaluation.ended for evaluation in ours) - min(evaluation.started for evaluation in ours)
    if span < 0:
        return None
    session_seconds = [evaluation.seconds - evaluation.seconds_before for evaluation in ours]
    busy = sum(seconds for seconds in session_seconds if not math.isnan(seconds))
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
