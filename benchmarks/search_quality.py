"""How good a search is: asynchronous workers in simulated time, beside Optuna's samplers and HEBO.

Prints regrets on tables of trained networks, functions and support vector machines, and what each ingredient of the
default is worth; draws the curves. `pip install '.[benchmarks]'` first.
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
from benchmarks import problems, simulation
from benchmarks.problems import FAMILIES, Problem
from benchmarks.searchers import Hebo, OptunaStudy, Searcher, optuna_sampler
from benchmarks.simulation import WORKERS, SimulatedIslands, simulate
from hpo.breeding.propagator_names import DEFAULT_PROPAGATORS

REFERENCE = "Optuna's TPE"
CLOSE = 1e-3  # regrets below are equal where their geometric mean is taken

Curves = dict[str, npt.NDArray[np.float64]]  # of each problem, shape (seeds, evaluations): the lowest regret so far
Make = Callable[[Problem, int, int], Searcher]  # from a problem, a seed and a number of workers


def _islands(
    names: tuple[str, ...], islands: int, changes: dict[str, float], problem: Problem, seed: int, workers: int
) -> Searcher:
    for name, value in changes.items():
        holder = next(module for module in _WITH_CONSTANTS if hasattr(module, name))
        setattr(holder, name, value)
    return SimulatedIslands(problem.space, names, islands, seed, workers)


def _study(name: str, problem: Problem, seed: int, _: int) -> Searcher:
    return OptunaStudy(problem.space, optuna_sampler(name, seed))


def _hebo(problem: Problem, seed: int, _: int) -> Searcher:
    return Hebo(problem.space, seed)


_WITH_CONSTANTS: tuple[Any, ...] = (hpo.breeding.genetic, hpo.breeding.surrogate, simulation)
METHODS: dict[str, Make] = {
    "default, 2 islands": partial(_islands, DEFAULT_PROPAGATORS, 2, {}),
    "default, 4 islands": partial(_islands, DEFAULT_PROPAGATORS, 4, {}),
    "ga,tpe, 2 islands": partial(_islands, ("ga", "tpe"), 2, {}),
    "tpe, 2 islands": partial(_islands, ("tpe",), 2, {}),
    "propulate, 2 islands": partial(_islands, ("propulate",), 2, {}),
    "random": partial(_islands, ("random",), 1, {}),
    REFERENCE: partial(_study, "TPE"),
    "Optuna's CMA-ES": partial(_study, "CMA-ES"),
}
SLOW: dict[str, Make] = {"Optuna's GP": partial(_study, "GP")}
if find_spec("hebo"):
    SLOW["HEBO"] = _hebo
WITHOUT: dict[str, Make] = {
    "a surrogate": partial(_islands, ("ga",), 2, {"_OFFSPRING": 1, "_NEWCOMERS": 0, "_GENERATIONS": 0}),
    "breeding on it": partial(_islands, ("ga",), 2, {"_GENERATIONS": 0}),
    "the order of losses": partial(_islands, ("ga",), 2, {"_EXPLORATION_SHARE": 0.0}),
    "their power": partial(_islands, ("ga",), 2, {"_EXPLORATION_SHARE": 1.0}),
    "newcomers": partial(_islands, ("ga",), 2, {"_NEWCOMERS": 0}),
    "several parents": partial(_islands, ("ga",), 2, {"_PARENTS": 1}),
    "exchange": partial(_islands, ("ga",), 2, {"_EXCHANGE": -1.0}),
}


def _curve(method: Make, family: str, name: str, seed: int, workers: int) -> npt.NDArray[np.float64]:
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    problem = problems.load(family, name)
    regrets = simulate(method(problem, seed, workers), problem.evaluate, problems.after(family)[-1], workers)
    return np.minimum.accumulate(regrets)


def measure(
    methods: dict[str, Make], family: str, every: int, seeds: int, workers: int, processes: int
) -> dict[str, Curves]:
    """Run all methods on a family's problems, CMA-ES only on those of numbers, and return the curves of each method."""
    results: dict[str, Curves] = {}
    for label, method in methods.items():
        if "CMA-ES" in label and family not in ("hpobench", "bbob", "bbob-mixint"):
            continue
        # New processes for each method, since methods change constants.
        with ProcessPoolExecutor(processes) as pool:
            jobs = {
                name: [pool.submit(_curve, method, family, name, seed, workers) for seed in range(seeds)]
                for name in problems.names(family)[::every]
            }
            results[label] = {name: np.array([job.result() for job in runs]) for name, runs in jobs.items()}
    return results


def _regrets(curves: Curves, evaluations: int) -> npt.NDArray[np.float64]:
    """Return the mean regret over seeds after so many evaluations, of each problem."""
    return np.array([curve[:, evaluations - 1].mean() for curve in curves.values()])


def _mean(regrets: npt.NDArray[np.float64], family: str) -> float:
    if problems.means(family) == "arithmetic":
        return float(np.mean(regrets))
    return float(np.exp(np.mean(np.log(np.maximum(regrets, CLOSE)))))


def print_regrets(results: dict[str, Curves], family: str) -> None:
    """Print mean regrets, their ratios to Optuna's TPE, the worst of these, and mean ranks."""
    reference, after = results[REFERENCE], problems.after(family)
    print(f"\n{family}: {len(reference)} problems, {problems.means(family)} means")
    print(f"{'':22s}" + "".join(f"{f'after {n}':>36s}" for n in after))
    print(f"{'':22s}" + f"{'regret':>10s}{'of TPE':>9s}{'worst':>9s}{'rank':>8s}" * len(after))
    for label, curves in results.items():
        cells = ""
        for n in after:
            regrets, of_tpe = _regrets(curves, n), _regrets(reference, n)
            close = CLOSE if problems.means(family) == "geometric" else 1e-6
            worst = np.max(np.maximum(regrets, close) / np.maximum(of_tpe, close))
            ranks = 1 + np.sum([_regrets(other, n) < regrets for other in results.values()], axis=0)
            mean = _mean(regrets, family)
            cells += f"{mean:10.4f}{mean / _mean(of_tpe, family):9.2f}{worst:9.2f}{np.mean(ranks):8.1f}"
        print(f"{label:22s}{cells}", flush=True)


def print_ingredients(results: dict[str, Curves], default: Curves, family: str) -> None:
    """Print how many times the regret is without each ingredient of the default."""
    print(f"\n{family}: regret without an ingredient, in multiples of the default's")
    print(f"{'':30s}" + "".join(f"{f'after {n}':>12s}" for n in problems.after(family)))
    for label, curves in results.items():
        times = [
            _mean(_regrets(curves, n), family) / _mean(_regrets(default, n), family) for n in problems.after(family)
        ]
        print(f"without {label:22s}" + "".join(f"{ratio:12.2f}" for ratio in times), flush=True)


def draw(results: dict[str, dict[str, Curves]], path: Path) -> None:
    """Draw the mean regret over the number of evaluations, for each family."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(5 * len(results), 4), layout="constrained", squeeze=False)
    for axis, (family, methods) in zip(axes[0], results.items(), strict=True):
        last = problems.after(family)[-1]
        for label, curves in methods.items():
            thick = 2.5 if label.startswith("default") else 1.2
            shown = [_mean(_regrets(curves, n), family) for n in range(1, last + 1)]
            axis.plot(range(1, last + 1), shown, label=label, linewidth=thick)
        axis.set(title=family, xlabel="evaluations", yscale="log", xlim=(8, last))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("mean regret")
    axes[0][0].legend(fontsize=8)  # some methods are for numbers alone
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--every", type=int, default=1, help="only the first problem of so many")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--slow-seeds", type=int, default=0, help="of Optuna's GP, and of HEBO where it is installed")
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--parts", default="regrets,ingredients")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--picture", type=Path, default=Path("search_quality.png"))
    chosen = parser.parse_args()
    families, parts = chosen.families.split(","), chosen.parts.split(",")
    drawn = {}
    for family in families:
        run = partial(measure, family=family, every=chosen.every, workers=chosen.workers, processes=chosen.processes)
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
        draw(drawn, chosen.picture)
        print(f"\nthe curves are in {chosen.picture}")


if __name__ == "__main__":
    main()
