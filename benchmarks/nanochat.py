"""Measure searches on a language model: nanochat, trained for five minutes on a GPU.

The trials are those of Ferreira et al., Can LLMs beat classical HPO algorithms? (2026,
arXiv:2603.24647): 14 hyperparameters, with which a third of the trainings ran out of memory. A
surrogate that is fitted to them replaces the training, so that searches run in simulated time.

The CSV file has a row per trial: method, seed, trial, val_bpb (empty after a failure), success,
seconds, and the hyperparameters.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import optuna

from benchmarks.priors import IslandsWithFirst, add_priors
from benchmarks.searchers import OptunaStudy, make_optuna_sampler
from hpo.space import Categorical, Float, Int, Ordinal, Parameter, SearchSpace

Vector = npt.NDArray[np.float64]
Params = Mapping[str, Any]

_NUMBERS: dict[str, Parameter] = {
    "DEPTH": Int(4, 24),
    "ASPECT_RATIO": Int(32, 128),
    "EMBEDDING_LR": Float(0.01, 2.0, log=True),
    "UNEMBEDDING_LR": Float(0.0005, 0.05, log=True),
    "MATRIX_LR": Float(0.005, 0.2, log=True),
    "SCALAR_LR": Float(0.05, 2.0, log=True),
    "WEIGHT_DECAY": Float(0.0, 0.5),
    "WARMUP_RATIO": Float(0.0, 0.3),
    "WARMDOWN_RATIO": Float(0.1, 0.8),
    "FINAL_LR_FRAC": Float(0.0, 0.2),
}
_POWERS: dict[str, tuple[int, ...]] = {
    "HEAD_DIM": (64, 128, 256),
    "DEVICE_BATCH_SIZE": (32, 64, 128, 256),
    "TOTAL_BATCH_SIZE": tuple(2**exponent for exponent in range(16, 22)),
}
_PATTERN = Categorical("SSSL", "SSLL", "SLSL", "LLLL", "SSSS", "LSSL")
# As in the study: numbers, which it rounds to powers of two.
SPACE = SearchSpace(
    **_NUMBERS,
    **{name: Int(choices[0], choices[-1], log=True) for name, choices in _POWERS.items()},
    WINDOW_PATTERN=_PATTERN,
)
# As this project advises.
ORDINAL_SPACE = SearchSpace(
    **_NUMBERS,
    **{name: Ordinal(*choices) for name, choices in _POWERS.items()},
    WINDOW_PATTERN=_PATTERN,
)
# Those of nanochat, with which each method of the study began.
DEFAULTS: dict[str, Any] = {
    "DEPTH": 8,
    "ASPECT_RATIO": 64,
    "EMBEDDING_LR": 0.6,
    "UNEMBEDDING_LR": 0.004,
    "MATRIX_LR": 0.04,
    "SCALAR_LR": 0.5,
    "WEIGHT_DECAY": 0.2,
    "WARMUP_RATIO": 0.0,
    "WARMDOWN_RATIO": 0.5,
    "FINAL_LR_FRAC": 0.0,
    "HEAD_DIM": 128,
    "DEVICE_BATCH_SIZE": 128,
    "TOTAL_BATCH_SIZE": 2**19,
    "WINDOW_PATTERN": "SSSL",
}
_NOISE = 0.0003  # The standard deviation of val_bpb between repeats.
_FLOOR = 0.96  # The logarithm of the difference to it is learned.
_GOOD = 1.02  # Below, a Gaussian process predicts; above, a forest.
_LEARNED = 1.05  # It learns trials below.
_SAMPLES = 2500  # Trials that the Gaussian process learns.
_HYPERPARAMETER_SAMPLES = 500  # Of these, its lengths.
_TREES = 200
_SEQUENCE = 2048  # Tokens of a sequence.
_PENALTY = 100.0  # The loss of a failure.


@dataclass(frozen=True)
class Trials:
    """Trainings of the study: features, and results. A loss is NaN after a failure."""

    runs: list[str]
    features: Vector
    losses: Vector
    seconds: Vector

    @classmethod
    def read(cls, path: Path) -> Trials:
        """Read a CSV file."""
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        return cls(
            [f"{row['method']} {row['seed']}" for row in rows],
            np.array([compute_features(_read_params(row)) for row in rows]),
            np.array([float(row["val_bpb"] or "nan") for row in rows]),
            np.array([float(row["seconds"]) for row in rows]),
        )

    def select(self, chosen: npt.NDArray[np.bool_]) -> Trials:
        """Return some of the trials."""
        runs = [run for run, is_chosen in zip(self.runs, chosen, strict=True) if is_chosen]
        return Trials(runs, self.features[chosen], self.losses[chosen], self.seconds[chosen])


def _read_params(row: Mapping[str, str]) -> dict[str, Any]:
    params: dict[str, Any] = {"WINDOW_PATTERN": row["WINDOW_PATTERN"]}
    return params | {name: float(row[name]) for name in (*_NUMBERS, *_POWERS)}


def round_params(params: Params) -> dict[str, Any]:
    """Round sizes to powers of two, as the study does, and raise the batch to one sequence each."""
    rounded = dict(params)
    for name, choices in _POWERS.items():
        rounded[name] = min(choices, key=lambda choice: (abs(choice - params[name]), choice))
    least = rounded["DEVICE_BATCH_SIZE"] * _SEQUENCE
    return rounded | {"TOTAL_BATCH_SIZE": max(rounded["TOTAL_BATCH_SIZE"], least)}


def compute_features(params: Params) -> list[float]:
    """Return the hyperparameters as numbers, with sizes of the network that follow from them."""
    head = params["HEAD_DIM"]
    batch = params["DEVICE_BATCH_SIZE"]
    depth = params["DEPTH"]
    width = math.ceil(depth * params["ASPECT_RATIO"] / head) * head
    pattern = [float(letter == "L") for letter in params["WINDOW_PATTERN"]]
    shares = ("WEIGHT_DECAY", "WARMUP_RATIO", "WARMDOWN_RATIO", "FINAL_LR_FRAC")
    scales = [name for name in (*_NUMBERS, *_POWERS) if name not in shares]
    return [
        *(math.log2(params[name]) for name in scales),
        *(float(params[name]) for name in shares),
        *pattern,
        sum(pattern),
        math.log2(width),
        math.log2(width * depth * batch),  # activations
        math.log2(width * batch),
        math.log2(width * width * depth),  # weights
        math.log2(params["TOTAL_BATCH_SIZE"] / batch / _SEQUENCE),
    ]


class Surrogate:
    """Predicts the results of trainings from those of the study."""

    def __init__(self, trials: Trials, seed: int = 0) -> None:
        from sklearn.ensemble import ExtraTreesClassifier, ExtraTreesRegressor
        from sklearn.preprocessing import StandardScaler

        rng = np.random.default_rng(seed)
        succeeded = np.isfinite(trials.losses)
        features = trials.features[succeeded]
        losses = trials.losses[succeeded]
        self._success = ExtraTreesClassifier(_TREES, random_state=seed)
        self._success.fit(trials.features, succeeded)
        self._forest = ExtraTreesRegressor(_TREES, random_state=seed)
        self._forest.fit(features, _transform(losses))
        self._failure = ExtraTreesRegressor(_TREES, min_samples_leaf=5, random_state=seed)
        self._failure.fit(trials.features[~succeeded], np.log(trials.seconds[~succeeded]))
        good = np.flatnonzero(losses < _LEARNED)
        good = rng.permutation(good)[:_SAMPLES]
        self._scaler = StandardScaler().fit(features[good])
        self._process = _fit_process(self._scaler.transform(features[good]), losses[good])

    def predict(self, features: Vector) -> tuple[Vector, Vector, Vector]:
        """Return the chance of success, val_bpb after a success, and seconds after a failure."""
        chances = self._success.predict_proba(features)[:, 1]
        losses = _invert(self._forest.predict(features))
        smooth = _invert(self._process.predict(self._scaler.transform(features)))
        losses = np.where(losses < _GOOD, smooth, losses)
        return chances, losses, np.exp(self._failure.predict(features))

    def evaluate(self, params: Params, rng: np.random.Generator) -> tuple[float, float]:
        """Return val_bpb, infinite after a failure, and the seconds of a training."""
        chance, loss, seconds = self.predict(np.array([compute_features(round_params(params))]))
        if chance[0] < 0.5:
            return math.inf, float(seconds[0])
        return float(loss[0] + rng.normal(0, _NOISE)), 300.0


def _fit_process(features: Vector, losses: Vector) -> Any:
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    lengths = RBF(np.full(features.shape[1], 4.0), (0.3, 100))
    kernel = ConstantKernel(1.0) * lengths + WhiteKernel(1e-2, (1e-6, 1))
    few = slice(_HYPERPARAMETER_SAMPLES)
    first = GaussianProcessRegressor(kernel, normalize_y=True)
    first.fit(features[few], _transform(losses[few]))
    process = GaussianProcessRegressor(first.kernel_, optimizer=None, normalize_y=True)
    return process.fit(features, _transform(losses))


def _transform(losses: Vector) -> Vector:
    return np.log(losses - _FLOOR)


def _invert(transformed: Vector) -> Vector:
    return np.exp(transformed) + _FLOOR


def check_surrogate(trials: Trials) -> None:
    """Print how well a surrogate predicts each run of the study from all others."""
    print(f"{'':28s}{'AUC of success':>16s}{'rank corr.':>12s}{'median error':>14s}   left out")
    runs = np.array(trials.runs)
    everything = []
    for run in dict.fromkeys(trials.runs):
        left_out = trials.select(runs == run)
        chances, losses, _ = Surrogate(trials.select(runs != run)).predict(left_out.features)
        everything.append((left_out.losses, chances, losses))
        _print_check(run, left_out.losses, chances, losses)
    true, chances, losses = (np.concatenate(part) for part in zip(*everything, strict=True))
    _print_check("all", true, chances, losses)
    best = true <= np.nanquantile(true, 0.1)
    _print_check("the best tenth", true[best], chances[best], losses[best])


def _print_check(name: str, true: Vector, chances: Vector, losses: Vector) -> None:
    from scipy.stats import spearmanr
    from sklearn.metrics import roc_auc_score

    succeeded = np.isfinite(true)
    score = "" if succeeded.all() else f"{roc_auc_score(succeeded, chances):.3f}"
    correlation = spearmanr(true[succeeded], losses[succeeded])[0]
    error = np.median(np.abs(true - losses)[succeeded])
    print(f"{name:28s}{score:>16s}{correlation:12.3f}{error:14.4f}", flush=True)


class Searcher(Protocol):
    """A search that also learns the seconds of evaluations."""

    def ask(self, worker: int) -> Params:
        """Return hyperparameters for a worker."""

    def tell(self, worker: int, loss: float, *, seconds: float) -> None:
        """Record a loss, infinite after a failure."""


class _Study(OptunaStudy):
    """An Optuna study that begins with the defaults.

    A failure is recorded as a high loss, as in the study of nanochat, or as a failed trial.
    """

    def __init__(self, name: str, fails_trials: bool, seed: int, _: int) -> None:
        super().__init__(SPACE, make_optuna_sampler(name, seed))
        self._study.enqueue_trial(DEFAULTS)
        self._fails_trials = fails_trials

    def tell(self, worker: int, loss: float, *others: float, **_: float) -> None:
        """Record a loss."""
        is_hidden = math.isinf(loss) and not self._fails_trials
        super().tell(worker, _PENALTY if is_hidden else loss, *others)


def _make_islands(space: SearchSpace, seed: int, workers: int) -> Searcher:
    """Return the default search, which begins with the defaults of nanochat (`--enqueue`)."""
    return IslandsWithFirst(space, seed, DEFAULTS, 2 if workers > 1 else 1, workers)


METHODS: dict[str, Callable[[int, int], Searcher]] = {
    "default": partial(_make_islands, SPACE),
    "default, Ordinal": partial(_make_islands, ORDINAL_SPACE),
    "default, priors": partial(_make_islands, add_priors(ORDINAL_SPACE, DEFAULTS, "medium")),
    "TPE": partial(_Study, "TPE", False),
    "TPE, failed trials": partial(_Study, "TPE", True),
    "CMA-ES": partial(_Study, "CMA-ES", False),
    "random": partial(_Study, "random", False),
}
# The time and the loss of each evaluation, in the order of their ends.
Ends = list[tuple[float, float]]

_surrogate: Surrogate  # Of a process of the pool.


def _load_surrogate(path: Path, seed: int) -> None:
    global _surrogate
    _surrogate = Surrogate(Trials.read(path), seed)


def _simulate(label: str, seed: int, workers: int, hours: float) -> Ends:
    """Return the ends of a search's evaluations, in hours."""
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    searcher = METHODS[label](seed, workers)
    rng = np.random.default_rng(seed)
    events: list[tuple[float, int, float, float]] = []

    def start(worker: int, now: float) -> None:
        loss, seconds = _surrogate.evaluate(searcher.ask(worker), rng)
        heapq.heappush(events, (now + seconds / 3600, worker, loss, seconds))

    ends: Ends = []
    for worker in range(workers):
        start(worker, 0.0)
    while events[0][0] <= hours:
        now, worker, loss, seconds = heapq.heappop(events)
        searcher.tell(worker, loss, seconds=seconds)
        ends.append((now, loss))
        start(worker, now)
    return ends


def _find_hours(ends: Ends, target: float) -> float:
    return next((hours for hours, loss in ends if loss <= target), math.inf)


def _describe(values: Sequence[float], digits: int) -> str:
    """Return the median and the quartiles."""
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75], method="higher")
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def _print_runs(label: str, workers: int, runs: Sequence[Ends], targets: Sequence[float]) -> None:
    failed = [100 * np.mean([math.isinf(loss) for _, loss in ends]) for ends in runs]
    best = [min(loss for _, loss in ends) for ends in runs]
    hours = [[_find_hours(ends, target) for ends in runs] for target in targets]
    columns = [_describe(each, 1) for each in hours]
    columns += [f"{np.mean(failed):.1f}%", _describe(best, 4)]
    print(f"{label:22s}{workers:3d}" + "".join(f"{text:>26s}" for text in columns), flush=True)


def draw_curves(results: Mapping[str, Sequence[Ends]], hours: float, path: Path) -> None:
    """Draw the median of the lowest val_bpb over the hours, with the quartiles."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    grid = np.linspace(0, hours, 500)
    for label, runs in results.items():
        curves = np.array([_compute_curve(ends, grid) for ends in runs])
        low, middle, high = np.quantile(curves, [0.25, 0.5, 0.75], axis=0, method="higher")
        thick = 2.5 if label.startswith("default") else 1.2
        axis.fill_between(grid, low, high, alpha=0.12)
        axis.plot(grid, middle, label=label, linewidth=thick)
    axis.set(xlabel="hours", ylabel="lowest val_bpb", xlim=(0, hours), ylim=(0.97, 0.998))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, loc="upper right", ncols=3)
    figure.savefig(path, dpi=110)


def _compute_curve(ends: Ends, grid: Vector) -> Vector:
    times, losses = np.array([(0.0, math.inf), *ends]).T
    lowest: Vector = np.minimum.accumulate(losses)
    return lowest[np.searchsorted(times, grid, side="right") - 1]


def main() -> None:
    """Check the surrogate, or print the hours and failures of all methods."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("trials", type=Path, help="CSV file of the study's trials")
    parser.add_argument("--check", action="store_true", help="check the surrogate instead")
    parser.add_argument("--methods", default=";".join(METHODS), help="default: all")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--surrogate-seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--figure", type=Path, help="also draw the curves into this file")
    chosen = parser.parse_args()
    if chosen.check:
        check_surrogate(Trials.read(chosen.trials))
        return
    targets = (0.985, 0.980)
    heads = [f"hours to {target}" for target in targets] + ["out of memory", "best val_bpb"]
    print(f"{'':18s}workers" + "".join(f"{head:>26s}" for head in heads))
    initialize = (chosen.trials, chosen.surrogate_seed)
    results: dict[str, list[Ends]] = {}
    with ProcessPoolExecutor(chosen.processes, None, _load_surrogate, initialize) as pool:
        for label in chosen.methods.split(";"):
            jobs = [
                pool.submit(_simulate, label, seed, chosen.workers, chosen.hours)
                for seed in range(chosen.seeds)
            ]
            results[label] = [job.result() for job in jobs]
            _print_runs(label, chosen.workers, results[label], targets)
    if chosen.figure:
        draw_curves(results, chosen.hours, chosen.figure)


if __name__ == "__main__":
    main()
