"""Problems that are functions with a known minimum.

They are the suites bbob and bbob-mixint of the package COCO.
"""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cocoex
import numpy as np
import numpy.typing as npt

from hpo.space import Float, Int, SearchSpace

SUITES = ("bbob", "bbob-mixint")
KINDS = range(1, 25)  # Hansen et al., RR-6829 (2009), describes them.
INSTANCE = 3  # Index of the shift and rotation. Instance 1 is reserved for other checks.


@dataclass
class Function:
    """A function of several numbers, with its known minimum.

    The regret is the value minus the minimum.

    The simulated duration of an evaluation is log-normal, with a median of 10 s and sigma 0.3.
    """

    name: str
    space: SearchSpace
    _compute: Any
    _lowest: float
    _draws: np.random.Generator = field(repr=False)
    optimum: npt.NDArray[np.float64] = field(repr=False)
    """The parameters with the lowest value, shape `(parameters,)`."""

    def evaluate(self, params: Mapping[str, Any]) -> tuple[float, float]:
        """Return the value minus the minimum, and the simulated seconds of the evaluation."""
        regret = float(self._compute(list(map(float, params.values())))) - self._lowest
        return max(regret, 0.0), 10 * float(self._draws.lognormal(0, 0.3))


def list_names(suite: str) -> list[str]:
    """Return the names of a suite's functions, such as "f3-5" for function 3 with 5 parameters.

    Functions 1, 3, 5 and so on have 5 parameters in bbob and 10 in bbob-mixint. Functions 2, 4, 6
    and so on have 10 in bbob and 5 in bbob-mixint.
    """
    odd, even = (5, 10) if suite == "bbob" else (10, 5)
    return [f"f{kind}-{odd if kind % 2 else even}" for kind in KINDS]


def load(suite: str, name: str) -> Function:
    """Load a function.

    Its integer variables become `Int` parameters, and the others `Float` parameters.
    """
    kind, dimension = (int(part) for part in name.removeprefix("f").split("-"))
    functions = cocoex.Suite(suite, f"instances: {INSTANCE}", f"dimensions: {dimension}")
    problem = functions.get_problem_by_function_dimension_instance(kind, dimension, INSTANCE)
    bounds = list(zip(problem.lower_bounds.tolist(), problem.upper_bounds.tolist(), strict=True))
    whole = problem.number_of_integer_variables
    space = SearchSpace(
        **{
            f"x{index}": Int(int(low), int(high))
            for index, (low, high) in enumerate(bounds[:whole])
        },
        **{
            f"x{whole + index}": Float(low, high)
            for index, (low, high) in enumerate(bounds[whole:])
        },
    )
    draws = np.random.default_rng(zlib.crc32(f"{suite}/{name}".encode()))
    optimum = _read_optimum(problem)
    return Function(
        f"{suite}/{name}",
        space,
        _ProblemWithSuite(functions, problem),
        problem(optimum),
        draws,
        optimum,
    )


class _ProblemWithSuite:
    """A problem with a reference to its suite. A suite that is deleted also frees its problems."""

    def __init__(self, suite: Any, problem: Any) -> None:
        self._suite = suite
        self._problem = problem

    def __call__(self, point: list[float]) -> float:
        return float(self._problem(point))


def _read_optimum(problem: Any) -> Any:
    """Return the position of a problem's minimum.

    The package cocoex can only write it to a file in the working directory. So the function changes
    to a temporary folder.
    """
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            problem._best_parameter("print")
        finally:
            os.chdir(before)
        return np.loadtxt(next(Path(folder).iterdir()))
