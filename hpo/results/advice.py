"""Give advice after a run: what to do next, the evidence for it, and the command to type.

Each rule names a cause and a remedy, and has a low rate of false alarms.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from hpo.results.confirmation import (
    ConfirmedIndividual,
    compare_confirmed,
    compute_margin,
    count_seeds_needed,
    describe_margin,
    select_comparable,
)
from hpo.results.crowded_bounds import BEST_COUNT, find_crowded_bounds
from hpo.results.failures import FailureRegion, find_failure_kinds
from hpo.results.run_snapshot import RunSnapshot
from hpo.results.summary import select_session
from hpo.store.inheritance import has_inheritance
from hpo.store.json_values import is_number
from hpo.store.manifest import parse_start
from hpo.text_format import (
    cut_text,
    format_count,
    format_duration,
    format_list,
    format_number,
    format_percent,
    make_show_command,
)

_MAX_REASON_LENGTH = 80
_MAX_NAME_LENGTH = 28

# Share of a loss. Other seeds may easily swap two evaluations that are so close.
_MAX_RELATIVE_GAP = 0.02
_MIN_EQUAL = 4  # Losses of different individuals.
_MIN_SEEDS = 3  # Seeds for each of the best.
_MAX_SEEDS = 30

_CURVE_COUNT = 5  # Number of best evaluations whose loss curves are used.
_MIN_EPOCHS = 4
_MIN_EPOCH_GAIN = 0.02  # Share of the loss that twice as many epochs must gain.

_MIN_BUSY_FRACTION = 0.5
_MIN_SESSION_SECONDS = 60.0  # Shorter sessions have no time that is worth saving.
# Shorter evaluations do not take long compared with the pauses between them.
_SHORT_EVALUATION_SECONDS = 1.0


@dataclass(frozen=True)
class Advice:
    """A recommendation for the next step after a run."""

    kind: str
    """The kind of advice, which is worker, failures, equal, confirm, bounds, epochs or idle."""
    text: str
    evidence: str
    command: str = ""
    """The command to type after `mpirun` or another launcher; empty if there is none."""


def find_advice(run: RunSnapshot) -> list[Advice]:
    """Return the advice that follows from the state of a run, the most urgent first."""
    region, is_of_one_reason = _find_failure_region(run)
    found = [
        _advise_on_broken_workers(run),
        _advise_on_failures(run, region, is_of_one_reason) if region else None,
        _advise_on_equal_losses(run) or _advise_confirmation(run),
        _advise_wider_space(run, region),
        _advise_more_epochs(run),
        _advise_on_idle_workers(run),
    ]
    return [advice for advice in found if advice is not None]


def _advise_on_broken_workers(run: RunSnapshot) -> Advice | None:
    if not run.broken_workers:
        return None
    evidence = " ".join(f"{description}." for description in run.broken_workers)
    text = "Repair or exclude the hosts or GPUs of workers that have left the run."
    return Advice("worker", text, evidence)


def _find_failure_region(run: RunSnapshot) -> tuple[FailureRegion | None, bool]:
    """Return the region of the most frequent reason that has one, and whether others exist.

    Failures for different reasons have different causes, so they have no region in common.
    """
    kinds = find_failure_kinds(run.evaluations, run.distributions)
    region = next((kind.region for kind in kinds if kind.region is not None), None)
    return region, len(kinds) > 1


def _advise_on_failures(run: RunSnapshot, region: FailureRegion, is_of_one_reason: bool) -> Advice:
    count = len(region.failed)
    latest = region.failed[-1]
    conditions = format_list(region.conditions)
    reason = cut_text(latest.failure or "", _MAX_REASON_LENGTH)
    of_reason, for_it = (" for one reason", " for it") if is_of_one_reason else ("", "")
    return Advice(
        "failures",
        f"Exclude {conditions} from the search space, or make such evaluations possible.",
        f"{count} of {region.all_failed} failures{of_reason} have {conditions}, and {count} of the "
        f"{region.ended} evaluations there failed{for_it}. The latest failure there is {reason}.",
        make_show_command(run.run_dir, latest.label),
    )


def _advise_on_equal_losses(run: RunSnapshot) -> Advice | None:
    """Advise to check the objective if hyperparameters have no effect on the loss."""
    losses = [evaluation.loss for evaluation in run.rank_complete()]
    if len(losses) < _MIN_EQUAL or losses[0] != losses[-1]:
        return None
    return Advice(
        "equal",
        "Check that the training uses its hyperparameters. A script may read others, or ignore "
        "its arguments.",
        f"All {len(losses)} losses are {format_number(losses[0])}, so they do not depend on the "
        "hyperparameters.",
    )


def _advise_confirmation(run: RunSnapshot) -> Advice | None:
    if run.is_running or not run.is_spent:
        return None  # A resumed run would search first.
    if not run.confirmations:
        return _advise_first_confirmation(run)
    if not all(evaluation.is_finished for evaluation in run.confirmations):
        return None
    entries = compare_confirmed(run.confirmations)
    if len(entries) < 2 or entries[0].mean is None:
        return None
    if select_comparable(entries):
        is_front = run.manifest.objectives.is_multi_objective
        return None if is_front else _advise_after_comparison(run, entries)
    seeds = run.manifest.confirm_seeds
    if seeds >= _MIN_SEEDS or entries[1].failed > entries[0].failed:
        return None
    return Advice(
        "confirm",
        f"Confirm with {_MIN_SEEDS} seeds or more.",
        f"The losses of {format_count(seeds, 'seed')} each are too few to compare the winner with "
        "the others.",
        run.format_confirm_command(_MIN_SEEDS),
    )


def _advise_first_confirmation(run: RunSnapshot) -> Advice | None:
    """Advise to confirm the best individual if the loss of the second best is close.

    A Pareto front has several best individuals anyway, so it needs no such advice.
    """
    if run.manifest.objectives.is_multi_objective or run.manifest.confirm_seeds:
        return None
    best = run.rank_complete()[:2]
    if len(best) < 2 or has_inheritance(run.evaluations):
        return None
    gap = _compute_relative_gap(best[0].loss, best[1].loss)
    if gap > _MAX_RELATIVE_GAP:
        return None
    differ = f"differ by {format_percent(gap)}" if gap else "are the same"
    evidence = (
        f"The losses of trials {best[0].trial} and {best[1].trial} {differ}, and each was trained "
        "once, with one seed."
    )
    if run.manifest.lacks_seed:
        evidence += " The script must take the seed, as --seed or by another option."
        if not run.has_space_in_command:
            evidence += " Add '--seed', '{seed}' to the Script in the search file."
    return Advice(
        "confirm",
        "Train the best again with other seeds before you rely on the winner.",
        evidence,
        run.format_confirm_command(_MIN_SEEDS),
    )


def _advise_after_comparison(
    run: RunSnapshot, entries: Sequence[ConfirmedIndividual]
) -> Advice | None:
    """Advise to choose among several individuals that are equally good, see `compute_margin`.

    Give no advice if only one individual is certainly as good as the best. If none is, advise to
    use more seeds.
    """
    seeds = run.manifest.confirm_seeds
    first = entries[0]
    given = f"With {format_count(seeds, 'other seed')} each"
    deviation = describe_margin(entries, compute_margin(entries) or 0.0)
    good = [entry.trial for entry in entries if entry.as_good]
    if len(good) > 1:
        return Advice(
            "confirm",
            f"Take the cheapest of trials {format_list(good, len(good))}.",
            f"{given}, they are as good as the best within {deviation}.",
        )
    if good:
        return None
    choice = f"take trial {first.trial}"
    if first.worse_by_at_most is not None:
        worse_by = format_number(first.worse_by_at_most)
        is_whole = len(select_comparable(entries)) == len(entries)
        best = "the best" if is_whole else "the best of those that failed as often"
        choice += f", which is worse than {best} by {worse_by} at most"
    possible = format_list(entry.trial for entry in entries if entry.may_be_best)
    why = (
        f"{given}, trials {possible} may be the best, and none is certain to be as good within "
        f"{deviation}."
    )
    most = max(_MAX_SEEDS, 2 * seeds)
    needed = count_seeds_needed(entries, most)
    if needed is None:
        text = f"{choice[0].upper()}{choice[1:]}."
        return Advice("confirm", text, f"{why} That would need more than {most} seeds.")
    text = f"Confirm with {needed} seeds, or {choice}."
    return Advice("confirm", text, why, run.format_confirm_command(needed))


def _advise_wider_space(run: RunSnapshot, failure_region: FailureRegion | None) -> Advice | None:
    """Advise to widen the search space if the best evaluations lie at its bounds.

    A hyperparameter by which failures are described is left out: its range is too wide already.
    """
    if run.manifest.objectives.is_multi_objective:
        return None  # The ends of a front lie at bounds naturally.
    founders = [evaluation for evaluation in run.rank_complete() if evaluation.inherits is None]
    conditions = failure_region.conditions if failure_region else ()
    failing = {condition.split()[0] for condition in conditions}
    beyond = []
    crowded = []
    for edge in find_crowded_bounds(founders, run.distributions):
        if edge.name not in failing:
            name = cut_text(edge.name, _MAX_NAME_LENGTH)
            side, bound = ("above", "upper") if edge.is_upper else ("below", "lower")
            beyond.append(f"{name} {side} {format_number(edge.bound)}")
            crowded.append(f"{edge.count} have {name} at its {bound} bound")
    if not beyond:
        return None
    after = ", after you have changed --space" if run.has_space_in_command else ""
    return Advice(
        "bounds",
        f"Widen the search space, if such values make sense: {format_list(beyond)}.",
        f"Of the best {BEST_COUNT}, {format_list(crowded)}; and the nearer to it, the lower is the "
        f"loss. A new run can start from the evaluations of this run{after}.",
        run.format_new_command("--warm-start", str(run.run_dir)),
    )


def _advise_more_epochs(run: RunSnapshot) -> Advice | None:
    """Advise to train for more epochs, if the five best losses still fall and would fall further.

    False alarms are rare. After 4 epochs or more, a curve that has stopped falling may be lowest at
    its final epoch by chance. The probability is at most 1/4. For all five curves, it is at most
    4^-5 = 1/1,024.
    """
    if has_inheritance(run.evaluations):
        return None  # The training of parents continues in their offspring.
    own = [evaluation for evaluation in run.rank_complete() if not evaluation.imported_from]
    curves = [[loss for _, loss in sorted(e.curve.items())] for e in own[:_CURVE_COUNT]]
    if len(curves) < _CURVE_COUNT or not all(map(_is_falling, curves)):
        return None
    if statistics.median(map(_estimate_epoch_gain, curves)) < _MIN_EPOCH_GAIN:
        return None
    falls = [_compute_relative_gap(curve[-1 - len(curve) // 4], curve[-1]) for curve in curves]
    counts = {len(curve) // 4 for curve in curves}
    last = f"{min(counts)} epochs" if len(counts) == 1 else "quarter of the epochs"
    last = "epoch" if counts == {1} else last
    lowered = dict.fromkeys([format_percent(min(falls)), format_percent(max(falls))])
    command = ""
    epochs = run.manifest.settings.get("epochs")
    sessions = run.manifest.sessions
    is_kept = all(session.settings.get("epochs", epochs) == epochs for session in sessions)
    is_searched = "epochs" in run.distributions
    if type(epochs) is int and epochs > 0 and is_kept and not is_searched:
        command = run.format_new_command(epochs=2 * epochs)
    return Advice(
        "epochs",
        "Train for more epochs, in a new run, because losses after more epochs cannot be compared "
        "with these.",
        f"The loss of each of the best {_CURVE_COUNT} is lowest after its last epoch; the last "
        f"{last} lowered it by {' to '.join(lowered)}.",
        command,
    )


def _is_falling(curve: Sequence[float]) -> bool:
    is_finite = all(map(math.isfinite, curve))
    return len(curve) >= _MIN_EPOCHS and is_finite and curve[-1] < min(curve[:-1])


def _estimate_epoch_gain(curve: Sequence[float]) -> float:
    """Estimate the share by which twice as many epochs reduce the loss.

    The gain of each quarter of the epochs is assumed to be a constant fraction of the previous
    quarter's gain.
    """
    quarter = len(curve) // 4
    scale = max(map(abs, curve))
    before, then, now = (curve[-1 - back * quarter] / scale for back in (2, 1, 0))
    if then >= before or not now:
        return 0.0
    ratio = min(1.0, (then - now) / (before - then))
    return (then - now) * sum(ratio**count for count in range(1, 5)) / abs(now)


def _compute_relative_gap(first: float, second: float) -> float:
    """Return the difference of two losses as a share of the larger absolute value."""
    return abs(first - second) / max(abs(first), abs(second)) if first != second else 0.0


def _advise_on_idle_workers(run: RunSnapshot) -> Advice | None:
    """Advise to use fewer workers if those of the latest session were idle for most of the time.

    There are too many if they waited at the end, or if evaluations are so short that workers wait
    for each other.
    """
    layout = run.manifest.layout
    busy = _to_float(run.last_summary.get("worker_busy_fraction"))
    seconds = _to_float(run.last_summary.get("wall_seconds"))
    if not (0 <= busy < _MIN_BUSY_FRACTION and seconds >= _MIN_SESSION_SECONDS):
        return None
    ours = select_session([*run.evaluations, *run.confirmations], parse_start(run.manifest.started))
    ours = [e for e in ours if math.isfinite(e.started) and math.isfinite(e.ended)]
    if not 1 < layout.workers < len(ours):
        return None
    first = min(evaluation.started for evaluation in ours)
    last = max(evaluation.ended for evaluation in ours)
    ends = {e.worker: e.ended for e in sorted(ours, key=attrgetter("ended"))}
    at_the_end = sum(last - ends.get(worker, first) for worker in range(layout.workers))
    between = (1 - busy) * layout.workers * (last - first) - at_the_end
    rarely = f"Workers were busy {format_percent(busy)} of the time"
    if at_the_end >= between:
        return Advice(
            "idle",
            "Use fewer workers of more ranks each, or more evaluations.",
            f"{rarely}. They were mostly idle at the end, while other workers ran the last "
            "evaluations.",
            _format_fewer_workers(run),
        )
    takes = statistics.median(evaluation.ended - evaluation.started for evaluation in ours)
    if takes >= _SHORT_EVALUATION_SECONDS:
        # The cause of the pauses is not known: start-up, a slow disk, or a busy database.
        return None
    return Advice(
        "idle",
        "Use fewer workers of more ranks each: evaluations are too short for this many workers.",
        f"{rarely}: an evaluation takes {format_duration(takes)}, and then its worker waits for "
        f"{format_duration(between / len(ours))}.",
        _format_fewer_workers(run),
    )


def _format_fewer_workers(run: RunSnapshot) -> str:
    """Return the command for half as many workers; empty if the islands would have too few."""
    layout = run.manifest.layout
    islands = max(run.options.get("islands") or 1, len(run.manifest.propagators))
    if layout.workers % 2 or islands > layout.workers // 2:
        return ""
    return run.format_new_command("--ranks-per-worker", str(2 * layout.ranks_per_worker))


def _to_float(value: object) -> float:
    return float(value) if is_number(value) else math.nan  # type: ignore[arg-type]
