"""The names of the propagators, for who chooses one and need not import it."""

from __future__ import annotations

PROPAGATORS = ("ga", "tpe", "cmaes", "pso", "nelder-mead", "propulate", "random")
OF_NUMBERS = ("cmaes", "pso", "nelder-mead")  # which search no categorical parameters
DEFAULT_PROPAGATORS = ("ga",)
