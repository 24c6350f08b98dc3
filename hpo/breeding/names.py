"""The names of the propagators, for code that need not import the propagators themselves."""

from __future__ import annotations

PROPAGATORS = ("ga", "tpe", "cmaes", "pso", "nelder-mead", "propulate", "random")
OF_NUMBERS = ("cmaes", "pso", "nelder-mead")  # which search no categorical parameters
OF_SEVERAL = ("ga", "tpe", "random")  # which search for several objectives
DEFAULT_PROPAGATORS = ("ga",)
