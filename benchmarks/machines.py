"""Problems that train a support vector machine in each evaluation.

The search was not tuned on these problems.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, make_friedman1
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import KFold, cross_val_score
from sklearn.preprocessing import scale
from sklearn.svm import SVC, SVR

from hpo.space import Categorical, Float, Int, SearchSpace

_SAMPLES = 300
_MOST_STEPS = 10_000  # Steps of an optimization, also if it has not converged.
_KERNELS: dict[str, Any] = {
    "C": Float(1e-3, 1e3, log=True),
    "kernel": Categorical("rbf", "poly", "sigmoid"),
    "gamma": Float(1e-5, 10.0, log=True),
    "degree": Int(2, 5),
    "coef0": Float(0.0, 2.0),
    "shrinking": Categorical(True, False),
}
_CLASSIFICATION = SearchSpace(**_KERNELS, balanced=Categorical(True, False))
_REGRESSION = SearchSpace(**_KERNELS, epsilon=Float(1e-3, 1.0, log=True))

# Lowest loss of eight searches with 250 evaluations (four by ga, four by TPE), and median of 1,000
# random draws.
_RANGES = {
    "breast_cancer": (0.02, 0.11),
    "digits": (1 / 60, 0.57),
    "diabetes": (0.50378, 0.99346),
    "friedman": (0.14674, 0.97580),
}
NAMES = tuple(_RANGES)


@dataclass
class Machine:
    """A problem that trains a support vector machine.

    Its regret is 0 for the lowest known loss, and 1 for the median of random hyperparameters. The
    simulated duration of an evaluation is log-normal, with a median of 10 s and sigma 0.3.
    """

    name: str
    space: SearchSpace
    _inputs: npt.NDArray[np.float64] = field(repr=False)
    _targets: npt.NDArray[np.float64] = field(repr=False)
    _draws: np.random.Generator = field(repr=False)

    def evaluate(self, params: Mapping[str, Any]) -> tuple[float, float]:
        """Train with these hyperparameters.

        Return their regret, and the simulated seconds of the evaluation.
        """
        lowest, median = _RANGES[self.name]
        regret = (self.compute_loss(params) - lowest) / (median - lowest)
        return max(regret, 0.0), 10 * float(self._draws.lognormal(0, 0.3))

    def compute_loss(self, params: Mapping[str, Any]) -> float:
        """Compute the mean error rate or, for regression, mean squared error over three folds."""
        chosen = dict(params, max_iter=_MOST_STEPS)
        classes = "balanced" in chosen
        if classes:
            chosen["class_weight"] = "balanced" if chosen.pop("balanced") else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            scores = cross_val_score(
                SVC(**chosen) if classes else SVR(**chosen),
                self._inputs,
                self._targets,
                cv=KFold(3, shuffle=True, random_state=0),
                scoring="accuracy" if classes else "neg_mean_squared_error",
            )
        return float(classes - scores.mean())


@cache
def load(name: str) -> Machine:
    """Load the problem of a data set. Inputs are scaled to mean 0 and variance 1."""
    if name == "friedman":
        inputs, targets = make_friedman1(_SAMPLES, noise=1.0, random_state=0)
    else:
        data = {
            "breast_cancer": load_breast_cancer,
            "digits": load_digits,
            "diabetes": load_diabetes,
        }[name]
        inputs, targets = (values[:_SAMPLES] for values in data(return_X_y=True))
    if name in ("friedman", "diabetes"):
        return Machine(name, _REGRESSION, scale(inputs), scale(targets), np.random.default_rng(0))
    return Machine(name, _CLASSIFICATION, scale(inputs), targets, np.random.default_rng(0))
