"""The names of the propagators, for code that need not import the propagators themselves."""

from __future__ import annotations

PROPAGATORS = ("ga", "tpe", "cmaes", "pso", "nelder-mead", "propulate", "random")
OF_NUMBERS = ("cmaes", "pso", "nelder-mead")  # which search no categorical parameters
OF_SEVERAL = ("ga", "tpe", "random")  # which search for several objectives
OF_LINES = ("ga", "tpe", "random")  # which do not take a parent's merit for that of hyperparameters
DEFAULT_PROPAGATORS = ("ga",)
