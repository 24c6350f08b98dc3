"""Run one command after the other: mpirun -n 4 python serve_jobs.py JOBS TEMPLATES.

Each rank connects to the socket JOBS, from which it gets all commands. `tests.support.job_server`
is the other end. The templates of the commands (processes that trainers are forked from) are forked
by serve_templates.py at TEMPLATES.
"""

import gc
import json
import logging
import os
import select
import socket
import sys
import tempfile
import traceback
import warnings

import hpo.cli.entry
import hpo.ranks.communicator
import hpo.run.leader_stages
from hpo.process import clock
from hpo.process.launcher import make_plain_environment
from tests.support.forked_template import fork_templates, run_python

JOBS, TEMPLATES = sys.argv[1:3]
# The variables that mpirun has set for this rank.
OWN_VARIABLES = {
    name: value for name, value in os.environ.items() if name not in make_plain_environment()
}


freeze = gc.freeze


class CommandEnd(BaseException):
    """Raised when a command ends the process of its rank."""


def end_command(status):
    raise CommandEnd(status)


def change_program():
    """Let commands leave this process and MPI running, and have their templates forked."""
    hpo.cli.entry.exit_process = end_command
    hpo.ranks.communicator.finalize_mpi = lambda: None
    fork_templates(TEMPLATES)
    gc.freeze = lambda: None  # A command would keep its own garbage, with open files.


def run_command(arguments):
    """Run a program as `python ARGUMENTS` does, and return its exit status."""
    try:
        run_python(arguments)
    except CommandEnd as end:
        return int(end.args[0])
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def redirect_output(out, err):
    for number, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - as Python does when it starts
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def run_job(request):
    """Run a command with its own output, folder and variables.

    Then restore this process, and return the status.
    """
    path, handlers = list(sys.path), list(logging.root.handlers)
    tempfile.tempdir = None  # It depends on the variables.
    os.environ.clear()
    os.environ.update({**OWN_VARIABLES, **request["variables"]})
    os.chdir(request["folder"])
    redirect_output(request["out"], request["err"])
    with warnings.catch_warnings():
        status = run_command(request["arguments"])
    sys.stdout.flush()
    sys.stderr.flush()
    sys.path[:], logging.root.handlers[:] = path, handlers
    gc.enable()
    gc.collect()
    freeze()  # The next collection is faster without what commands have imported.
    return status


def serve():
    del sys.path[0]  # the folder of this file
    finalize_mpi = hpo.ranks.communicator.finalize_mpi
    change_program()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{JOBS}")
        requests = connection.makefile()
        while True:
            while not select.select([connection], [], [], 1.0)[0]:
                clock.now()  # Otherwise, this wait would count as a suspension of the job.
            if not (line := requests.readline()):
                break
            connection.sendall(f"{run_job(json.loads(line))}\n".encode())
    finalize_mpi()


if __name__ == "__main__":
    try:
        serve()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # Otherwise, MPI waits for the other ranks.
