"""A search whose objective forks processes that come out of it: by sys.exit, by an exception, or by yielding a loss."""

import os
import sys

from hpo import Float, SearchSpace

space = SearchSpace(x=Float(0.0, 1.0))


def objective(params, _):
    statuses = []
    for way in ("exit", "raise", "yield", "words"):
        child = os.fork()
        if child:
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        elif way == "exit":
            sys.exit(7)
        elif way == "words":
            sys.exit("injected: words")
        elif way == "raise":
            raise ValueError("injected: in a child")
        else:
            yield -1.0
    assert statuses == [7, 1, 0, 1], statuses
    yield params["x"]
