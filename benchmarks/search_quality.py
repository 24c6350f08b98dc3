"""How good a search is: 8 asynchronous workers in simulated time on tables of trained networks, beside Optuna's.

Prints mean regrets and ranks after 50, 100 and 200 evaluations, what each ingredient of the default is worth, and how
long breeding takes; draws the curves. `pip install '.[benchmarks]'` first.
"""

from __future__ import annotations

import argparse
import random
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import optuna

import hpo.breeding.genetic
from benchmarks import simulation
from benchmarks.simulation import OptunaStudy, Searcher, SimulatedIslands, optuna_sampler, simulate
from benchmarks.tables import FAMILIES, Table, load
from hpo import Categorical, Float, Int, SearchSpace
from hpo.breeding.names import DEFAULT_PROPAGATORS
from hpo.breeding.past import Past
from hpo.breeding.propagators import New, make
from hpo.breeding.upstream import Individual
from hpo.store.trials import Evaluation

EVALUATIONS = 200
AFTER = (50, 100, 200)
REFERENCE = "Optuna's TPE"

Curves = dict[str, npt.NDArray[np.float64]]  # of each table, shape (seeds, evaluations): the lowest regret so far
Make = Callable[[Table, int], Searcher]


def _islands(names: tuple[str, ...], islands: int, changes: dict[str, float], table: Table, seed: int) -> Searcher:
    for name, value in changes.items():
        setattr(hpo.breeding.genetic if hasattr(hpo.breeding.genetic, name) else simulation, name, value)
    return SimulatedIslands(table.space, names, islands, seed)


def _study(name: str, table: Table, seed: int) -> Searcher:
    return OptunaStudy(table.space, optuna_sampler(name, seed))


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
WITHOUT: dict[str, Make] = {
    "the model": partial(_islands, ("ga",), 2, {"_OFFSPRING": 1, "_NEWCOMERS": 0}),
    "newcomers": partial(_islands, ("ga",), 2, {"_NEWCOMERS": 0}),
    "offspring": partial(_islands, ("ga",), 2, {"_OFFSPRING": 1, "_NEWCOMERS": 149}),
    "exploration": partial(_islands, ("ga",), 2, {"_DEVIATIONS": 0.0}),
    "several parents": partial(_islands, ("ga",), 2, {"_PARENTS": 1}),
    "exchange": partial(_islands, ("ga",), 2, {"_EXCHANGE": -1.0}),
}


def _curve(method: Make, family: str, name: str, seed: int) -> npt.NDArray[np.float64]:
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    table = load(family, name)
    regrets = simulate(method(table, seed), table.evaluate, EVALUATIONS)
    return np.minimum.accumulate(regrets)


def measure(methods: dict[str, Make], families: list[str], seeds: int, processes: int) -> dict[str, Curves]:
    """Run all methods on all tables, CMA-ES only on tables of numbers, and return the curves of each method."""
    results: dict[str, Curves] = {}
    tables = [(family, name) for family in families for name in FAMILIES[family][0].available_dataset_names]
    for label, method in methods.items():
        here = [table for table in tables if "CMA-ES" not in label or table[0] == "hpobench"]
        # New processes for each method, since methods change constants.
        with ProcessPoolExecutor(processes) as pool:
            jobs = {table: [pool.submit(_curve, method, *table, seed) for seed in range(seeds)] for table in here}
            results[label] = {"/".join(table): np.array([job.result() for job in jobs[table]]) for table in here}
    return results


def _at(curves: Curves, table: str, evaluations: int) -> float:
    return float(curves[table][:, evaluations - 1].mean())


def print_regrets(results: dict[str, Curves], families: list[str]) -> None:
    """Print for each family mean regrets, their ratios to Optuna's TPE, the worst of these, and mean ranks."""
    reference = results[REFERENCE]
    for family in families:
        tables = [table for table in reference if table.startswith(family)]
        print(f"\n{family}: {len(tables)} tables")
        print(f"{'':22s}" + "".join(f"{f'after {n}':>36s}" for n in AFTER))
        print(f"{'':22s}" + f"{'regret':>10s}{'of TPE':>9s}{'worst':>9s}{'rank':>8s}" * len(AFTER))
        for label, curves in results.items():
            if tables[0] not in curves:
                continue
            cells = ""
            for n in AFTER:
                mean = np.mean([_at(curves, table, n) for table in tables])
                of_tpe = mean / np.mean([_at(reference, table, n) for table in tables])
                worst = max(_at(curves, table, n) / max(_at(reference, table, n), 1e-6) for table in tables)
                ranks = [
                    1 + sum(_at(other, t, n) < _at(curves, t, n) for other in results.values() if t in other)
                    for t in tables
                ]
                cells += f"{mean:10.4f}{of_tpe:9.2f}{worst:9.2f}{np.mean(ranks):8.1f}"
            print(f"{label:22s}{cells}")


def print_ingredients(results: dict[str, Curves], default: Curves, families: list[str]) -> None:
    """Print how many times the regret is without each ingredient of the default."""
    print("\nregret without an ingredient, in multiples of the default's")
    print(f"{'':22s}" + "".join(f"{f'{family} after {n}':>24s}" for family in families for n in AFTER))
    for label, curves in results.items():
        cells = ""
        for family in families:
            tables = [table for table in default if table.startswith(family)]
            for n in AFTER:
                ratio = np.sum([_at(curves, t, n) for t in tables]) / np.sum([_at(default, t, n) for t in tables])
                cells += f"{ratio:24.2f}"
        print(f"without {label:14s}{cells}")


def draw(results: dict[str, Curves], families: list[str], path: Path) -> None:
    """Draw the mean regret over the number of evaluations, for each family."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(families), figsize=(5 * len(families), 4), layout="constrained", squeeze=False)
    for axis, family in zip(axes[0], families, strict=True):
        for label, curves in results.items():
            shown = [curves[table].mean(axis=0) for table in curves if table.startswith(family)]
            if shown:
                thick = 2.5 if label.startswith("default") else 1.2
                axis.plot(range(1, EVALUATIONS + 1), np.mean(shown, axis=0), label=label, linewidth=thick)
        axis.set(title=family, xlabel="evaluations", yscale="log", xlim=(8, EVALUATIONS), ylim=(1e-4, 1))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("mean regret (0 best, 1 median)")
    axes[0][0].legend(fontsize=8)  # some methods are for tables of numbers alone
    figure.savefig(path, dpi=110)


def breeding_times(known: int) -> dict[str, float]:
    """Return the seconds that each propagator takes to breed an individual when so many evaluations are known."""
    space = SearchSpace(
        layers=Int(1, 20), lr=Float(1e-5, 1.0, log=True), gamma=Float(0.0, 1.0), act=Categorical("relu", "tanh", "elu")
    )
    numbers = SearchSpace(layers=Int(1, 20), lr=Float(1e-5, 1.0, log=True), gamma=Float(0.0, 1.0))
    times = {}
    for name in ("ga", "tpe", "cmaes", "pso", "nelder-mead", "propulate", "random"):
        searched = numbers if name in ("cmaes", "pso", "nelder-mead") else space
        rng = random.Random(0)
        drawn = [searched.draw(rng) for _ in range(known)]
        news = [Evaluation(i, "complete", rng.random(), params, 0, 0, i, ended=i) for i, params in enumerate(drawn)]
        population = list(starmap(partial(_individual, searched), ((e.params, e.loss, e.trial) for e in news)))
        past = Past(searched, partial(_take, news))
        breed = New(make(name, past, rng, 4, 0), past, rng)
        breed(population)
        start = time.perf_counter()
        for _ in range(20):
            breed(population)
        times[name] = (time.perf_counter() - start) / 20
    return times


def _individual(space: SearchSpace, params: dict[str, Any], loss: float, generation: int) -> Individual:
    individual = Individual(dict(space.encode(params)), space.limits())
    individual.loss, individual.generation, individual.rank = loss, generation, generation % 4
    return individual


def _take(news: list[Evaluation]) -> list[Evaluation]:
    taken = list(news)
    news.clear()
    return taken


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--slow-seeds", type=int, default=3, help="of Optuna's GP, which takes a second an evaluation")
    parser.add_argument("--parts", default="regrets,ingredients,times")
    parser.add_argument("--families", default="hpobench,hpolib,nasbench201")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--picture", type=Path, default=Path("search_quality.png"))
    chosen = parser.parse_args()
    families, parts = chosen.families.split(","), chosen.parts.split(",")
    if "regrets" in parts:
        results = measure(METHODS, families, chosen.seeds, chosen.processes)
        if chosen.slow_seeds:
            results |= measure(SLOW, families, chosen.slow_seeds, chosen.processes)
        print_regrets(results, families)
        draw(results, families, chosen.picture)
        print(f"\nthe curves are in {chosen.picture}\n")
    if "ingredients" in parts:
        default = "default, 2 islands"
        results = measure({default: METHODS[default], **WITHOUT}, families, chosen.seeds, chosen.processes)
        print_ingredients(results, results.pop(default), families)
    if "times" in parts:
        print_breeding_times()


def print_breeding_times() -> None:
    """Print how long each propagator takes to breed an individual."""
    for known in (100, 1_000, 10_000):
        times = ", ".join(f"{name} {1000 * seconds:.1f}" for name, seconds in breeding_times(known).items())
        print(f"milliseconds to breed an individual when {known} evaluations are known: {times}")


if __name__ == "__main__":
    main()
