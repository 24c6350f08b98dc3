"""Functions with a known lowest value: COCO's bbob and bbob-mixint."""

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

from hpo.parameters import Float, Int
from hpo.space import SearchSpace

SUITES = ("bbob", "bbob-mixint")
KINDS = range(1, 25)  # separable, ill-conditioned, multi-modal, ...: see Hansen et al., RR-6829 (2009)
INSTANCE = 3  # which shift and rotation; not 1, which is kept for checks by others


@dataclass
class Function:
    """A function of numbers, from which its lowest value is taken: the regret of what a search finds.

    An evaluation takes 10 s of simulated time, and up to twice as much or as little.
    """

    name: str
    space: SearchSpace
    _compute: Any
    _lowest: float
    _draws: np.random.Generator = field(repr=False)

    def evaluate(self, params: Mapping[str, Any]) -> tuple[float, float]:
        """Return the regret of a point, and how long it takes."""
        regret = float(self._compute(list(map(float, params.values())))) - self._lowest
        return max(regret, 0.0), 10 * float(self._draws.lognormal(0, 0.3))


def names(suite: str) -> list[str]:
    """Return the names of a suite's functions: the odd ones of 5 numbers, the even ones of 10; vice versa in mixint."""
    odd, even = (5, 10) if suite == "bbob" else (10, 5)
    return [f"f{kind}-{odd if kind % 2 else even}" for kind in KINDS]


def load(suite: str, name: str) -> Function:
    """Make a function: its integers are Int, and its other numbers Float."""
    kind, dimension = (int(part) for part in name.removeprefix("f").split("-"))
    functions = cocoex.Suite(suite, f"instances: {INSTANCE}", f"dimensions: {dimension}")
    problem = functions.get_problem_by_function_dimension_instance(kind, dimension, INSTANCE)
    bounds = list(zip(problem.lower_bounds.tolist(), problem.upper_bounds.tolist(), strict=True))
    whole = problem.number_of_integer_variables
    space = SearchSpace(
        **{f"x{place}": Int(int(low), int(high)) for place, (low, high) in enumerate(bounds[:whole])},
        **{f"x{whole + place}": Float(low, high) for place, (low, high) in enumerate(bounds[whole:])},
    )
    draws = np.random.default_rng(zlib.crc32(f"{suite}/{name}".encode()))
    return Function(f"{suite}/{name}", space, _Kept(functions, problem), problem(_best(problem)), draws)


class _Kept:
    """A problem and its suite, without which it would be gone."""

    def __init__(self, suite: Any, problem: Any) -> None:
        self._suite = suite
        self._problem = problem

    def __call__(self, point: list[float]) -> float:
        return float(self._problem(point))


def _best(problem: Any) -> Any:
    """Return where a function is lowest, which cocoex writes to a file in the working directory, and nowhere else."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            problem._best_parameter("print")
        finally:
            os.chdir(before)
        return np.loadtxt(next(Path(folder).iterdir()))
