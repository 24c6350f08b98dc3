"""What it is worth to pause instead of to train to the end: searches in simulated time, on curves of real networks.

    python -m benchmarks.fidelity

lets 8 workers draw individuals at random from benchmarks/curves.parquet, with each seed others, for as long as it
takes to train a third of them to the end. It says when, with each pruner, a complete evaluation has the loss that is
the lowest without one, as a share of that time, and what the lowest is at the end. Individuals are drawn with
replacement, as from a space that is not exhausted.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.curves import Curve, load
from hpo.store.rungs import HALVINGS, Halving, promotable, rungs_of
from hpo.store.trials import Evaluation

WORKERS = 8
_TOLERANCE = 1e-3  # of the loss that is to be reached
_MANY = 3000  # more than are drawn

# What becomes of an evaluation that goes on: its state, given all of them.
Rule = Callable[[Evaluation, Sequence[Evaluation]], str]


class Search:
    """A search in simulated time: `complete` are the times at which evaluations have ended, with their losses."""

    def __init__(self, curves: Sequence[Curve], rule: Rule, halving: Halving | None = None) -> None:
        self._curves = list(curves)
        self._rule = rule
        self._halving = halving  # for what is promoted
        self._evaluations: list[Evaluation] = []
        self.complete: list[tuple[float, float]] = []

    def run(self, until: float) -> Search:
        """Search for so many seconds, or until all individuals have been drawn and nothing goes on."""
        events = [(0.0, worker, -1) for worker in range(WORKERS)]
        while events:
            now, worker, trial = heapq.heappop(events)
            if now > until:
                break
            if trial < 0 or not self._goes_on(trial, now):
                trial = self._next()
            if trial >= 0:
                heapq.heappush(events, (now + self._curves[trial].seconds, worker, trial))
        return self

    def best(self, until: float = math.inf) -> float:
        """Return the lowest loss of the evaluations that were complete at a time."""
        return min((loss for time, loss in self.complete if time <= until), default=math.inf)

    def seconds_to(self, loss: float) -> float:
        """Return when an evaluation was complete that had such a loss, or a lower one; infinity where none was."""
        return min((time for time, found in self.complete if found <= loss), default=math.inf)

    def _next(self) -> int:
        """Return what a worker that is free evaluates: what is promoted, or else another individual; -1 for nothing."""
        if self._halving and (paused := promotable(self._halving, self._evaluations)):
            self._evaluations[paused[0].trial] = replace(paused[0], state="running")
            return paused[0].trial
        trial = len(self._evaluations)
        if trial == len(self._curves):
            return -1
        self._evaluations.append(Evaluation(trial, "running", math.inf, {}, 0, 0, 0))
        return trial

    def _goes_on(self, trial: int, now: float) -> bool:
        """Let an evaluation go on by an epoch, and tell whether it goes on afterwards."""
        one, losses = self._evaluations[trial], self._curves[trial].losses
        epoch = len(one.curve) + 1
        if epoch > len(losses):  # it fails
            self._evaluations[trial] = replace(one, state="failed")
            return False
        one = replace(one, curve={**one.curve, epoch: float(losses[epoch - 1])})
        self._evaluations[trial] = one
        if epoch == len(losses):
            self._evaluations[trial] = replace(one, state="complete")
            self.complete.append((now, min(one.curve.values())))
            return False
        state = self._rule(one, self._evaluations)
        self._evaluations[trial] = replace(one, state=state, paused_after=epoch)
        return state == "running"


def no_rule(_: Evaluation, __: Sequence[Evaluation]) -> str:
    """Prune nothing."""
    return "running"


def median(one: Evaluation, evaluations: Sequence[Evaluation]) -> str:
    """Stop what is worse than the median of the others at its epoch, as Optuna's pruner does by default."""
    epoch = len(one.curve)
    others = [other.curve[epoch] for other in evaluations if other.state == "complete" and epoch in other.curve]
    return "pruned" if len(others) >= 5 and min(one.curve.values()) > statistics.median(others) else "running"


def halving_rule(halving: Halving, below: str) -> Rule:
    """Return the rule by which evaluations go on at rungs; the others are paused, or pruned."""

    def rule(one: Evaluation, evaluations: Sequence[Evaluation]) -> str:
        if not halving.has_rung(one.trial, len(one.curve)):
            return "running"
        here = (halving.bracket_of(one.trial), len(one.curve))
        rungs = [rung for rung in rungs_of(halving, evaluations) if (rung.bracket, rung.epochs) == here]
        return below if rungs and rungs[0].place(one.trial) >= rungs[0].go_on else "running"

    return rule


def methods() -> dict[str, Callable[[Sequence[Curve]], Search]]:
    """Return searches by the names of their pruners."""
    found: dict[str, Callable[[Sequence[Curve]], Search]] = {
        "none": lambda curves: Search(curves, no_rule),
        "median": lambda curves: Search(curves, median),
    }
    for name, halving in HALVINGS.items():
        found[f"{name}, stopping"] = lambda curves, h=halving: Search(curves, halving_rule(h, "pruned"))  # type: ignore[misc]
        found[name] = lambda curves, h=halving: Search(curves, halving_rule(h, "paused"), h)  # type: ignore[misc]
    return found


def main() -> None:
    """Print medians over the seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("search_spaces", nargs="*", default=["digits_cnn", "text_transformer"])
    parser.add_argument("--seeds", type=int, default=20)
    chosen = parser.parse_args()
    for name in chosen.search_spaces:
        curves = load(name)
        until = sum(one.seconds * len(one.losses) for one in curves) / 3 / WORKERS
        print(f"\n{name}: {len(curves)} individuals, {until:.0f} s of {WORKERS} workers")
        print(f"{'pruner':22s}time to none's lowest   reached   lowest, beside none's     at worst  complete")
        orders = [random.Random(seed).choices(curves, k=_MANY) for seed in range(chosen.seeds)]
        full = [Search(order, no_rule).run(until) for order in orders]
        for pruner, make in methods().items():
            times, ends, complete = [], [], []
            for order, other in zip(orders, full, strict=True):
                found, goal = make(order).run(until), other.best() * (1 + _TOLERANCE)
                times.append(found.seconds_to(goal) / until)
                ends.append(found.best() / other.best())
                complete.append(len(found.complete))
            reached = sum(map(math.isfinite, times))
            print(
                f"{pruner:22s}{statistics.median(times):21.2f}{reached:7d}/{len(times)}"
                f"{statistics.median(ends):24.3f}{max(ends):13.3f}{statistics.median(complete):10.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
