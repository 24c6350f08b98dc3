"""Find the hosts of a job that answer, and make the command that starts the job on them."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from hpo.run.launchers import Launcher
from hpo.run.program_words import find_option, set_option
from hpo.run.slurm import start_silently
from hpo.text_format import format_count

_SECONDS_TO_ANSWER = 15.0
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class StartPlan:
    """How a job starts: its command line, and its hosts."""

    words: list[str]
    """The command line."""
    workers: int
    """Number of workers; 0 if the hosts that answer have too few ranks for one."""
    ranks: str = ""
    """The number of ranks and the hosts in words; an empty text if the hosts are not known."""
    missing: tuple[str, ...] = ()
    """The hosts that do not answer."""

    def list_lost_hosts(self, before: StartPlan) -> list[str]:
        """Return the hosts that do not answer, and did answer before the job was started with the plan `before`."""
        return [host for host in self.missing if host not in before.missing]

    def describe(self, before: StartPlan) -> str:
        """Return in words how the job restarts, after it was started with the plan `before`."""
        lost = self.list_lost_hosts(before)
        text = f"{', '.join(lost)} do{'es' * (len(lost) == 1)} not answer; " if lost else ""
        if not self.workers:
            return f"{text}too few ranks are left for a worker; waiting for hosts"
        return f"{text}restarting it" + (f" with {self.ranks}" if self.missing or before.missing else "")


def plan_start(launcher: Launcher, ranks_per_worker: int, is_stopped: Callable[[], bool]) -> StartPlan:
    """Return how to start a job on the hosts that answer, with as many ranks as form whole workers.

    Args:
        launcher: The command line for all hosts.
        is_stopped: A function that returns whether the user wants to stop. Then, hosts are not waited for.
    """
    hosts = find_live_hosts(launcher, is_stopped)
    missing = tuple(host for host in launcher.capacities if host not in hosts)
    workers = min(launcher.ranks, sum(launcher.capacities[host] for host in hosts)) // ranks_per_worker
    ranks = workers * ranks_per_worker
    text = f"{format_count(ranks, 'rank')} on {', '.join(hosts)}"
    if not workers:
        return StartPlan(launcher.words, 0, text, missing)
    words = launcher.restrict(hosts, ranks)
    if not missing:
        return StartPlan(words, workers, text)
    words = set_option(words, "--ranks-per-worker", ranks_per_worker)
    propagators = len((find_option(words, "--propagators") or "").split(","))
    if max(int(find_option(words, "--islands") or 0), propagators) > workers:
        words = set_option(words, "--islands", workers)
    return StartPlan(words, workers, text, missing)


def find_live_hosts(launcher: Launcher, is_stopped: Callable[[], bool] = lambda: False) -> list[str]:
    """Return the hosts of a job on which ranks can be started now. All hosts are probed at the same time."""
    hosts = launcher.list_hosts()
    probes = {host: _start(command) for host in hosts if (command := launcher.make_probe(host))}
    end = time.monotonic() + _SECONDS_TO_ANSWER
    while any(probe is not None and probe.poll() is None for probe in probes.values()):
        if time.monotonic() > end or is_stopped():
            break
        time.sleep(_POLL_SECONDS)
    return [host for host in hosts if host not in probes or _has_succeeded(probes[host])]


def can_find_live_hosts(launcher: Launcher, is_stopped: Callable[[], bool]) -> bool:
    """Return whether probes work here, because another host than this one answers.

    They do not work if, for example, the launcher connects to hosts in another way than by ssh.
    """
    return any(launcher.make_probe(host) for host in find_live_hosts(launcher, is_stopped))


def _start(command: Sequence[str]) -> subprocess.Popen[bytes] | None:
    with suppress(OSError):
        return start_silently(command, os.environ)
    return None


def _has_succeeded(probe: subprocess.Popen[bytes] | None) -> bool:
    """Return whether a probe has ended well. A probe that has not ended is killed."""
    if probe is None:
        return False
    if probe.poll() is None:
        probe.kill()
        probe.wait()
    return probe.returncode == 0
