"""Advise on workers that are broken or idle."""

from __future__ import annotations

import math
import statistics

from hpo.results.advice.run_result import Advice, RunResult, format_percent
from hpo.store.json_values import is_number
from hpo.text_format import format_duration

_MIN_BUSY_FRACTION = 0.5
_MIN_SESSION_SECONDS = 60.0  # Shorter sessions have no time that is worth saving.
_SHORT_EVALUATION_SECONDS = 1.0  # Shorter evaluations do not take long compared with the pauses between them.


def advise_on_broken_workers(result: RunResult) -> Advice | None:
    """Advise to repair workers (groups of ranks) that have left the run, since they fail where others succeed."""
    if not result.broken_workers:
        return None
    evidence = " ".join(f"{description}." for description in result.broken_workers)
    return Advice("worker", "Repair or exclude the hosts or GPUs of workers that have left the run.", evidence)


def advise_on_idle_workers(result: RunResult) -> Advice | None:
    """Advise what to change if the workers of the latest session were idle for most of the time."""
    busy, wall = (_to_float(result.last_summary.get(name)) for name in ("worker_busy_fraction", "wall_seconds"))
    workers, size = result.manifest.layout.workers, result.manifest.layout.ranks_per_worker
    ours = [
        evaluation
        for evaluation in result.select_session()
        if math.isfinite(evaluation.started) and math.isfinite(evaluation.ended)
    ]
    if not (0 <= busy < _MIN_BUSY_FRACTION and wall >= _MIN_SESSION_SECONDS and 1 < workers < len(ours)):
        return None
    first, last = min(evaluation.started for evaluation in ours), max(evaluation.ended for evaluation in ours)
    ends = {evaluation.worker: evaluation.ended for evaluation in sorted(ours, key=lambda e: e.ended)}
    at_the_end = sum(last - ends.get(worker, first) for worker in range(workers))
    between = (1 - busy) * workers * (last - first) - at_the_end
    rarely = f"Workers were busy {format_percent(busy)} of the time"
    islands = max(result.options.get("islands") or 1, len(result.manifest.propagators))
    can_halve = workers % 2 == 0 and islands <= workers // 2
    fewer = result.format_new_command("--ranks-per-worker", str(2 * size)) if can_halve else ""
    if at_the_end >= between:
        why = f"{rarely}. They were mostly idle at the end, while other workers ran the last evaluations."
        return Advice("idle", "Use fewer workers of more ranks each, or more evaluations.", why, fewer)
    seconds = statistics.median(evaluation.ended - evaluation.started for evaluation in ours)
    pause = format_duration(between / len(ours))
    takes = f"an evaluation takes {format_duration(seconds)}, and then its worker waits for {pause}"
    if seconds < _SHORT_EVALUATION_SECONDS:
        text = "Use fewer workers of more ranks each: evaluations are too short for this many workers."
        return Advice("idle", text, f"{rarely}: {takes}.", fewer)
    text = "Find out what workers wait for: the disk of the run directory may be slow, or the database of --storage."
    return Advice("idle", text, f"{rarely}: {takes}.")


def _to_float(value: object) -> float:
    return float(value) if is_number(value) else math.nan  # type: ignore[arg-type]
