"""The names of the propagators, for code that does not need the propagators themselves."""

from __future__ import annotations

PROPAGATORS = ("ga", "tpe", "cmaes", "pso", "nelder-mead", "propulate", "random")
NUMERIC_PROPAGATORS = ("cmaes", "pso", "nelder-mead")  # Without categorical parameters.
MULTI_OBJECTIVE_PROPAGATORS = ("ga", "tpe", "random")  # Can search with several objectives.
PBT_PROPAGATORS = ("ga", "tpe", "random")  # Can separate the merit of the parent from the merit of hyperparameters.
DEFAULT_PROPAGATORS = ("ga",)
