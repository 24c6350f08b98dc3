"""A search of four floats. Their many digits show from which individual a value was copied."""

import time

from hpo import Float, SearchSpace

space = SearchSpace(**{name: Float(0.0, 1.0) for name in "abcd"})


def objective(params, _):
    time.sleep(0.05)
    return sum(params.values())
