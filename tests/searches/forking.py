"""A search whose objective ends a process that it has started, and takes for itself what is woken up on signals."""

import os
import signal
import time

from hpo import Float, SearchSpace

space = SearchSpace(x=Float(0.0, 1.0))


def objective(_params, _worker):
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    time.sleep(0.1)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    signal.set_wakeup_fd(-1)
    yield 1.0 if os.WTERMSIG(status) == signal.SIGTERM else float("nan")
    time.sleep(0.5)
