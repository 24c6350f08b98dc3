"""Measure the search with a time limit, if evaluations take different times.

The figures are the time until a regret, and the regret.

The time limit is the mean time that the search without a limit needs for 100 evaluations. With the
limit, the search prefers short evaluations at first, and may evaluate more.
"""

from __future__ import annotations

import argparse
import heapq
import warnings
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import functions, problems
from hpo.breeding.evaluation_history import TimeBudget
from hpo.options import DEFAULT_PROPAGATORS
from hpo.space import SearchSpace
from tests.support.simulation import WORKERS, SimulatedIslands

FAMILIES = ("hpobench", "hpolib", "nasbench201", *functions.SUITES)
# Added to regrets before their mean logarithm, which would be infinite if one of them is 0.
CLOSE = 1e-3
_MOST = 5  # Most evaluations of a search, as a multiple of those of the reference.
_BEYOND = 2.0  # Simulated time of a search, as a multiple of the limit.

# The time and the regret of each evaluation, in the order of their ends.
Ends = list[tuple[float, float]]


@dataclass(frozen=True)
class SlowFunction:
    """A function whose evaluations take different times.

    An evaluation takes 100 times as long at the upper bound of the first parameter as at the lower.
    """

    function: problems.Problem

    @property
    def space(self) -> SearchSpace:
        """The search space."""
        return self.function.space

    def evaluate(self, params: Mapping[str, Any]) -> tuple[float, float]:
        """Return the regret, and the simulated seconds of the evaluation."""
        regret, seconds = self.function.evaluate(params)
        name, first = next(iter(self.space.parameters.items()))
        low, high = first.limits
        return regret, seconds * 100 ** ((first.encode(params[name]) - low) / (high - low))


def _load_problem(family: str, name: str) -> problems.Problem:
    problem = problems.load(family, name)
    return SlowFunction(problem) if family in functions.SUITES else problem


def _simulate(
    family: str, name: str, seed: int, evaluations: int, limit: float, until: float
) -> Ends:
    """Return the ends of all evaluations until a time.

    An infinite limit means a search without a limit.
    """
    warnings.simplefilter("ignore")
    problem, clock = _load_problem(family, name), [0.0]
    islands = SimulatedIslands(problem.space, DEFAULT_PROPAGATORS, 2, seed)
    islands.history.time_budget = TimeBudget(limit, evaluations, 0.0, lambda: clock[0])
    events: list[tuple[float, int, float, float]] = []
    ends: Ends = []

    def start(worker: int) -> None:
        regret, seconds = problem.evaluate(islands.ask(worker))
        heapq.heappush(events, (clock[0] + seconds, worker, regret, seconds))

    for worker in range(WORKERS):
        start(worker)
    while events and len(ends) < evaluations and events[0][0] <= until:
        clock[0], worker, regret, seconds = heapq.heappop(events)
        islands.tell(worker, regret, seconds=seconds)
        ends.append((clock[0], regret))
        start(worker)
    return ends


def _compute_curve(runs: list[Ends], grid: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the geometric mean of the lowest regrets at the times of a grid."""
    logs = []
    for ends in runs:
        times, regrets = np.array(ends).T
        lowest = np.minimum.accumulate(regrets)
        index = np.searchsorted(times, grid, side="right") - 1
        logs.append(
            np.log(np.where(index < 0, regrets.max(), lowest[np.maximum(index, 0)]) + CLOSE)
        )
    curve: npt.NDArray[Any] = np.exp(np.mean(logs, axis=0))
    return curve


def _compare(
    before: list[Ends], after: list[Ends], limit: float, shares: list[float]
) -> list[float]:
    """Return, as ratios, the time until the regret of the reference, and the regrets.

    Both are computed at shares of the limit.
    """
    grid = np.linspace(0, _BEYOND * limit, 4001)[1:]
    old, new = _compute_curve(before, grid), _compute_curve(after, grid)
    times, regrets = [], []
    for share in shares:
        at = int(np.searchsorted(grid, share * limit)) - 1
        threshold = old[at] * (1 + 1e-9)
        times.append(_find_first(new, threshold) / _find_first(old, threshold))
        regrets.append(new[at] / old[at])
    return [*times, *regrets]


def _find_first(curve: npt.NDArray[Any], threshold: float) -> int:
    reached = np.flatnonzero(curve <= threshold)
    return int(reached[0]) + 1 if len(reached) else len(curve)


def main() -> None:
    """Print the times and regrets of all searches with a limit, relative to those without one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    problems.add_options(parser, FAMILIES)
    parser.add_argument("--evaluations", type=int, default=100)
    chosen = parser.parse_args()
    shares = [0.5, 0.75, 1.0]
    most = _MOST * chosen.evaluations
    print(
        f"{'':14s}{'time until the regret':>28s}{'regret':>24s}   at 1/2, 3/4 and all of the "
        "limit; without it 1"
    )
    everything: list[list[float]] = []
    with ProcessPoolExecutor(chosen.processes) as pool:
        for family in chosen.families.split(","):
            rows = []
            for name in problems.list_names(family)[chosen.first :: chosen.every]:
                seeds = range(chosen.seeds)
                # The reference ends after 100 evaluations, and runs again for longer when the limit
                # is known.
                infinite = float("inf")
                first = [
                    pool.submit(
                        _simulate, family, name, seed, chosen.evaluations, infinite, infinite
                    )
                    for seed in seeds
                ]
                limit = float(np.mean([job.result()[-1][0] for job in first]))
                jobs = [
                    [
                        pool.submit(_simulate, family, name, seed, most, own, _BEYOND * limit)
                        for seed in seeds
                    ]
                    for own in (infinite, limit)
                ]
                before, after = ([job.result() for job in runs] for runs in jobs)
                rows.append(_compare(before, after, limit, shares))
            everything += rows
            _print_means(family, rows)
    _print_means("all", everything)


def _print_means(label: str, rows: list[list[float]]) -> None:
    means = np.exp(np.mean(np.log(rows), axis=0))
    half = len(means) // 2
    texts = ["  ".join(f"{mean:.2f}" for mean in part) for part in (means[:half], means[half:])]
    print(f"{label:14s}{texts[0]:>28s}{texts[1]:>24s}", flush=True)


if __name__ == "__main__":
    main()
