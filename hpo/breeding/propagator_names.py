"""The names of the propagators, for code that need not import the propagators themselves."""

from __future__ import annotations

PROPAGATORS = ("ga", "tpe", "cmaes", "pso", "nelder-mead", "propulate", "random")
NUMERIC_PROPAGATORS = ("cmaes", "pso", "nelder-mead")  # which search no categorical parameters
MULTI_OBJECTIVE_PROPAGATORS = ("ga", "tpe", "random")  # which search for several objectives
PBT_PROPAGATORS = ("ga", "tpe", "random")  # which do not take a parent's merit for that of hyperparameters
DEFAULT_PROPAGATORS = ("ga",)
