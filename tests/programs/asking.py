"""Evaluate individuals by ask and tell: arguments RUN_DIR, EVALUATIONS, and COUNT to stop after.

Print the number of each trial, and wait for a line before its result is told.
"""

import sys

import hpo

space = hpo.SearchSpace(lr=hpo.Float(1e-4, 1e-1, log=True), layers=hpo.Int(1, 4))
search = hpo.Search(space, sys.argv[1], evaluations=int(sys.argv[2]))
while trial := search.ask():
    print(trial.number, flush=True)
    sys.stdin.readline()
    search.tell(trial, trial.params["lr"])
print([name for name in ("torch", "mpi4py", "propulate") if name in sys.modules])
