"""Measure this project's searches, Optuna's samplers and HEBO, in simulated time.

Workers are asynchronous. The problems are tables of trained networks, functions and support vector
machines. The script prints the regret of each search. It also prints the regret of the default
search without each of its ingredients, such as the surrogate. It draws the mean regrets over the
number of evaluations. Requires `pip install '.[benchmarks]'`.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import optuna

import hpo.breeding.genetic
import hpo.breeding.surrogate
from benchmarks import problems
from benchmarks.problems import FAMILIES, Problem
from benchmarks.searchers import Hebo, OptunaStudy, Searcher, make_optuna_sampler
from hpo.options import DEFAULT_PROPAGATORS
from tests.support import simulation
from tests.support.simulation import WORKERS, SimulatedIslands, simulate

REFERENCE = "Optuna's TPE"
CLOSE = 1e-3  # Smaller regrets count as equal in geometric means.

# By problem: lowest regret so far, shape (seeds, evaluations).
Curves = dict[str, npt.NDArray[np.float64]]
Make = Callable[[Problem, int, int], Searcher]  # Arguments: a problem, a seed, a number of workers.


def _make_islands(
    names: tuple[str, ...],
    islands: int,
    changes: dict[str, float],
    problem: Problem,
    seed: int,
    workers: int,
) -> Searcher:
    for name, value in changes.items():
        holder = next(module for module in _WITH_CONSTANTS if hasattr(module, name))
        setattr(holder, name, value)
    return SimulatedIslands(problem.space, names, islands, seed, workers)


def _make_study(name: str, problem: Problem, seed: int, _: int) -> Searcher:
    return OptunaStudy(problem.space, make_optuna_sampler(name, seed))


def _make_hebo(problem: Problem, seed: int, _: int) -> Searcher:
    return Hebo(problem.space, seed)


_WITH_CONSTANTS: tuple[Any, ...] = (hpo.breeding.genetic, hpo.breeding.surrogate, simulation)
METHODS: dict[str, Make] = {
    "default, 2 islands": partial(_make_islands, DEFAULT_PROPAGATORS, 2, {}),
    "default, 4 islands": partial(_make_islands, DEFAULT_PROPAGATORS, 4, {}),
    "ga,tpe, 2 islands": partial(_make_islands, ("ga", "tpe"), 2, {}),
    "tpe, 2 islands": partial(_make_islands, ("tpe",), 2, {}),
    "propulate, 2 islands": partial(_make_islands, ("propulate",), 2, {}),
    "random": partial(_make_islands, ("random",), 1, {}),
    REFERENCE: partial(_make_study, "TPE"),
    "Optuna's CMA-ES": partial(_make_study, "CMA-ES"),
}
SLOW: dict[str, Make] = {"Optuna's GP": partial(_make_study, "GP")}
if find_spec("hebo"):
    SLOW["HEBO"] = _make_hebo
WITHOUT: dict[str, Make] = {
    "a surrogate": partial(
        _make_islands, ("ga",), 2, {"_OFFSPRING": 1, "_NEWCOMERS": 0, "_GENERATIONS": 0}
    ),
    "generations on it": partial(_make_islands, ("ga",), 2, {"_GENERATIONS": 0}),
    "the order of losses": partial(_make_islands, ("ga",), 2, {"_EXPLORATION_SHARE": 0.0}),
    "the power transform": partial(_make_islands, ("ga",), 2, {"_EXPLORATION_SHARE": 1.0}),
    "newcomers": partial(_make_islands, ("ga",), 2, {"_NEWCOMERS": 0}),
    "several parents": partial(_make_islands, ("ga",), 2, {"_PARENTS": 1}),
    "exchange": partial(_make_islands, ("ga",), 2, {"_EXCHANGE": -1.0}),
}


def _measure_curve(
    method: Make, family: str, name: str, seed: int, workers: int
) -> npt.NDArray[np.float64]:
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    problem = problems.load(family, name)
    regrets = simulate(
        method(problem, seed, workers),
        problem.evaluate,
        problems.list_evaluation_counts(family)[-1],
        workers,
    )
    return np.minimum.accumulate(regrets)


def measure(
    methods: dict[str, Make], family: str, every: int, seeds: int, workers: int, processes: int
) -> dict[str, Curves]:
    """Run all methods on every `every`-th problem of a family, and return the curves by method.

    CMA-ES runs only on families without categorical parameters. A method is a function that makes a
    search.
    """
    results: dict[str, Curves] = {}
    for label, method in methods.items():
        if "CMA-ES" in label and family not in ("hpobench", "bbob", "bbob-mixint"):
            continue
        # Each method has new processes, since methods change constants.
        with ProcessPoolExecutor(processes) as pool:
            jobs = {
                name: [
                    pool.submit(_measure_curve, method, family, name, seed, workers)
                    for seed in range(seeds)
                ]
                for name in problems.list_names(family)[::every]
            }
            results[label] = {
                name: np.array([job.result() for job in runs]) for name, runs in jobs.items()
            }
    return results


def _compute_mean_regrets(curves: Curves, evaluations: int) -> npt.NDArray[np.float64]:
    """Return the regret of each problem after a number of evaluations, as a mean over seeds."""
    return np.array([curve[:, evaluations - 1].mean() for curve in curves.values()])


def _average(regrets: npt.NDArray[np.float64], family: str) -> float:
    if problems.select_kind_of_mean(family) == "arithmetic":
        return float(np.mean(regrets))
    return float(np.exp(np.mean(np.log(np.maximum(regrets, CLOSE)))))


def print_regrets(results: dict[str, Curves], family: str) -> None:
    """Print mean regrets, their mean and highest ratio to Optuna's TPE, and mean ranks."""
    reference, after = results[REFERENCE], problems.list_evaluation_counts(family)
    print(f"\n{family}: {len(reference)} problems, {problems.select_kind_of_mean(family)} means")
    print(f"{'':22s}" + "".join(f"{f'after {n}':>36s}" for n in after))
    print(f"{'':22s}" + f"{'regret':>10s}{'of TPE':>9s}{'worst':>9s}{'rank':>8s}" * len(after))
    for label, curves in results.items():
        cells = ""
        for n in after:
            regrets, of_tpe = _compute_mean_regrets(curves, n), _compute_mean_regrets(reference, n)
            close = CLOSE if problems.select_kind_of_mean(family) == "geometric" else 1e-6
            worst = np.max(np.maximum(regrets, close) / np.maximum(of_tpe, close))
            ranks = 1 + np.sum(
                [_compute_mean_regrets(other, n) < regrets for other in results.values()], axis=0
            )
            mean = _average(regrets, family)
            ratio = mean / _average(of_tpe, family)
            cells += f"{mean:10.4f}{ratio:9.2f}{worst:9.2f}{np.mean(ranks):8.1f}"
        print(f"{label:22s}{cells}", flush=True)


def print_ingredients(results: dict[str, Curves], default: Curves, family: str) -> None:
    """Print the regret without each ingredient of the default search, relative to the default."""
    print(f"\n{family}: regret without an ingredient, divided by the default's")
    print(
        f"{'':30s}"
        + "".join(f"{f'after {n}':>12s}" for n in problems.list_evaluation_counts(family))
    )
    for label, curves in results.items():
        times = [
            _average(_compute_mean_regrets(curves, n), family)
            / _average(_compute_mean_regrets(default, n), family)
            for n in problems.list_evaluation_counts(family)
        ]
        print(f"without {label:22s}" + "".join(f"{ratio:12.2f}" for ratio in times), flush=True)


def draw_curves(results: dict[str, dict[str, Curves]], path: Path) -> None:
    """Draw the mean regret over the number of evaluations, for each family."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        1, len(results), figsize=(5 * len(results), 4), layout="constrained", squeeze=False
    )
    for axis, (family, methods) in zip(axes[0], results.items(), strict=True):
        last = problems.list_evaluation_counts(family)[-1]
        for label, curves in methods.items():
            thick = 2.5 if label.startswith("default") else 1.2
            shown = [_average(_compute_mean_regrets(curves, n), family) for n in range(1, last + 1)]
            axis.plot(range(1, last + 1), shown, label=label, linewidth=thick)
        axis.set(title=family, xlabel="evaluations", yscale="log", xlim=(8, last))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("mean regret")
    axes[0][0].legend(fontsize=8)  # Only this axis has all methods.
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run all searches, print the regrets and draw the curves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--every", type=int, default=1, help="use every Nth problem")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument(
        "--slow-seeds",
        type=int,
        default=0,
        help="seeds of Optuna's GP, and of HEBO if it is installed",
    )
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--parts", default="regrets,ingredients")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--picture", type=Path, default=Path("search_quality.png"))
    chosen = parser.parse_args()
    families, parts = chosen.families.split(","), chosen.parts.split(",")
    drawn = {}
    for family in families:
        run = partial(
            measure,
            family=family,
            every=chosen.every,
            workers=chosen.workers,
            processes=chosen.processes,
        )
        if "regrets" in parts:
            drawn[family] = run(METHODS, seeds=chosen.seeds)
            if chosen.slow_seeds:
                drawn[family] |= run(SLOW, seeds=chosen.slow_seeds)
            print_regrets(drawn[family], family)
        if "ingredients" in parts:
            default = "default, 2 islands"
            results = run({default: METHODS[default], **WITHOUT}, seeds=chosen.seeds)
            print_ingredients(results, results.pop(default), family)
    if drawn:
        draw_curves(drawn, chosen.picture)
        print(f"\nthe curves are in {chosen.picture}")


if __name__ == "__main__":
    main()
