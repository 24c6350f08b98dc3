"""A search whose objective forks processes.

They end by sys.exit, by an exception, or by yielding a loss. Other forked processes, and programs
that it starts, are ended by a signal that the trainer itself ignores.
"""

import os
import signal
import subprocess
import sys
import time

from hpo import Float, SearchSpace

space = SearchSpace(x=Float(0.0, 1.0))


def terminated(delay):
    """Fork a process, terminate it after `delay` seconds, and return its status."""
    child = os.fork()
    if child == 0:
        time.sleep(3)
        os._exit(0)
    time.sleep(delay)  # at first, it has hardly begun
    os.kill(child, signal.SIGTERM)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


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
    assert [terminated(delay) for delay in (0.0, 0.01, 0.05)] == [-signal.SIGTERM] * 3
    with subprocess.Popen(["sleep", "60"]) as program:
        program.terminate()
    assert program.returncode == -signal.SIGTERM
    os.kill(os.getpid(), signal.SIGTERM)
    yield params["x"]
