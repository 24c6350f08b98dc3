"""A search whose evaluations each change what the kernel or Python keeps for their process.

Each prints first what it has found, to standard error, and a greeting to standard output.
"""

import locale
import os
import resource
import signal
import sys
import time

from hpo import Int, SearchSpace

space = SearchSpace(k=Int(0, 99))


def close_output():
    os.close(1)


def replace_output():
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def unblock_output():
    os.set_blocking(1, False)


def lower_priority():
    os.nice(5)


def lower_limit():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))


def block_signal():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])


def ignore_signal():
    signal.signal(signal.SIGWINCH, signal.SIG_IGN)


def bind_to_core():
    os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])


def change_time_zone():
    os.environ["TZ"] = "Asia/Tokyo"
    time.tzset()


def change_locale():
    locale.setlocale(locale.LC_ALL, "C")


def allow_recursion():
    sys.setrecursionlimit(5000)


WAYS = [
    *(close_output, replace_output, unblock_output, lower_priority, lower_limit, block_signal),
    *(ignore_signal, bind_to_core, change_time_zone, change_locale, allow_recursion),
]


def describe_process():
    return [
        *(os.nice(0), resource.getrlimit(resource.RLIMIT_NOFILE)[0], os.get_blocking(1)),
        *(signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getsignal(signal.SIGWINCH)),
        *(os.sched_getaffinity(0), time.tzname, locale.setlocale(locale.LC_ALL)),
        sys.getrecursionlimit(),
    ]


def objective(params, worker):
    print(f"seen {describe_process()}", file=sys.stderr)
    print("hello from", worker.trial, flush=True)
    if worker.trial < len(WAYS):
        WAYS[worker.trial]()
    return params["k"]
