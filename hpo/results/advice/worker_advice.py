"""Advise on workers that are broken or idle."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from hpo.layout import Layout
from hpo.results.advice.run_result import Advice, RunResult, format_list, format_percent
from hpo.store.elastic_candidates import find_help_periods
from hpo.store.evaluations import Evaluation
from hpo.store.json_values import is_number
from hpo.text_format import format_duration, make_show_command

_MIN_FAILED = 3
_MAX_FALSE_ALARM_RATE = 0.01  # Probability of advice if all workers fail equally often.
_MIN_BUSY_FRACTION = 0.5
_MIN_SESSION_SECONDS = 60.0  # Shorter sessions have no time that is worth saving.
_SHORT_EVALUATION_SECONDS = 1.0  # Shorter evaluations do not take long compared with the pauses between them.


def advise_on_broken_workers(result: RunResult) -> Advice | None:
    """Advise to check workers (groups of ranks) whose evaluations all fail, if others mostly succeed."""
    ours = result.select_session()
    broken = _find_broken_workers(ours)
    if not broken:
        return None
    theirs = [evaluation for evaluation in ours if evaluation.worker in broken]
    others = [evaluation.state for evaluation in ours if evaluation.worker not in broken]
    last = max(theirs, key=lambda evaluation: (evaluation.ended, evaluation.trial))
    named = f"worker {broken[0]}" if len(broken) == 1 else f"workers {format_list(broken)}"
    return Advice(
        "worker",
        f"Look at {named}: the host may be broken.",
        f"All {len(theirs)} evaluations of {named}{_format_ranks(broken, result.manifest.layout)} failed, and "
        f"{others.count('failed')} of the {len(others)} others.",
        make_show_command(result.run_dir, last.label),
    )


def _find_broken_workers(ours: Sequence[Evaluation]) -> list[int]:
    failed: dict[int, list[bool]] = {}
    for evaluation in ours:
        failed.setdefault(evaluation.worker, []).append(evaluation.state == "failed")
    others = [is_failed for ended in failed.values() if not all(ended) for is_failed in ended]
    if 2 * sum(others) >= len(others):
        return []
    usual = (sum(others) + 1) / (
        len(others) + 2
    )  # Laplace's rule of succession: few evaluations contain little information.
    return sorted(
        worker
        for worker, ended in failed.items()
        # The probability that any worker always fails by chance, if it fails as often as the others.
        if all(ended) and len(ended) >= _MIN_FAILED and usual ** len(ended) * len(failed) < _MAX_FALSE_ALARM_RATE
    )


def _format_ranks(workers: Sequence[int], layout: Layout) -> str:
    """Return the ranks of a worker as text, to identify its host; empty for several workers."""
    size = layout.ranks_per_worker
    if len(workers) > 1:
        return ""
    first, last = workers[0] * size, workers[0] * size + size - 1
    return f" (rank {first})" if size == 1 else f" (ranks {first} to {last})"


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
    helped = [
        (period.worker, period.stop)
        for evaluation in ours
        for period in find_help_periods(evaluation, evaluation.ended)
    ]
    ends = dict(
        sorted([*((evaluation.worker, evaluation.ended) for evaluation in ours), *helped], key=lambda end: end[1])
    )
    at_the_end = sum(last - ends.get(worker, first) for worker in range(workers))
    between = (1 - busy) * workers * (last - first) - at_the_end
    rarely = f"Workers were busy {format_percent(busy)} of the time"
    islands = max(result.options.get("islands") or 1, len(result.manifest.propagators))
    can_halve = workers % 2 == 0 and islands <= workers // 2
    fewer = result.format_new_command("--ranks-per-worker", str(2 * size)) if can_halve else ""
    if at_the_end >= between:
        why = f"{rarely}. They were mostly idle at the end, while other workers ran the last evaluations."
        can_grow = not (result.has_space_in_command or result.options.get("elastic"))
        if (
            can_grow
            and any(evaluation.checkpoint_step for evaluation in ours)
            and not any(evaluation.worker_groups for evaluation in ours)
        ):
            text = "Let idle workers join other workers at the end."
            why += " These evaluations save checkpoints."
            return Advice("idle", text, why, result.format_new_command("--elastic"))
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
