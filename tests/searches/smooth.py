"""A search of four floats, by whose digits one can see which individual has a gene from which."""

import time

from hpo import Float, SearchSpace

space = SearchSpace(**{name: Float(0.0, 1.0) for name in "abcd"})


def objective(params, _):
    time.sleep(0.05)
    return sum(params.values())
