"""Read and change the command line of a job: of its launcher, and of its search."""

from __future__ import annotations

import os
import re
import socket
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hpo.supervise.slurm import expand_counts, expand_nodes, make_small_step, read_output

_SECONDS_TO_CONNECT = 10

# Options without a value: a word after them is the program. A word after another option is its
# value.
_SHORT_FLAGS = ("-E", "-K", "-O", "-Q", "-X", "-l", "-q", "-s", "-u", "-v", "-Z")
_LONG_FLAGS = (
    *("contiguous", "disable-status", "exact", "exclusive", "hold", "interactive"),
    *("kill-on-bad-exit", "label", "no-kill", "overcommit", "overlap", "quiet", "spread-job"),
    *("unbuffered", "use-min-nodes", "whole"),
    *("allow-run-as-root", "oversubscribe", "tag-output", "verbose"),  # of mpirun
)
# Options with two values.
_PAIRS = frozenset(["-env", "-genv", "--mca", "-mca", "--gmca", "-gmca", "--prtemca", "--pmixmca"])
_FLAGS = frozenset(
    [*_SHORT_FLAGS, *(f"--{name}" for name in _LONG_FLAGS), "-prepend-rank", "-print-all-exitcodes"]
)


class Launcher(ABC):
    """A command line that starts the ranks of a job on several hosts.

    Attributes:
        capacities: The largest number of ranks on each host. Empty if it is not known.
        ranks: The number of ranks of the whole job.
    """

    _RANKS: tuple[str, ...] = ()

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        self.words = list(words)
        self.environment = environment
        self.capacities: Mapping[str, int] = self._find_capacities()
        self.ranks = _read_number(self.find_value(*self._RANKS)) or sum(self.capacities.values())

    @abstractmethod
    def _find_capacities(self) -> Mapping[str, int]: ...

    @abstractmethod
    def list_hosts(self) -> list[str]:
        """Return the hosts on which ranks may be started now."""

    @abstractmethod
    def make_probe(self, host: str) -> list[str]:
        """Return a command that succeeds if ranks can be started on a host; [] for none."""

    @abstractmethod
    def restrict(self, hosts: Sequence[str], ranks: int) -> list[str]:
        """Return the command line for a restart on these hosts, with this number of ranks."""

    def find_value(self, *names: str) -> str:
        """Return the value of an option of the launcher, given by any name; "" if not given."""
        position = _find_words(self.words, names)
        if position is None:
            return ""
        word, *value = self.words[slice(*position)]  # -n 4, --ntasks=4 or -n4
        return value[0] if value else word.partition("=")[2] or word.lstrip("-")[1:]


class Srun(Launcher):
    """srun in a SLURM allocation, on all of its nodes."""

    _RANKS = ("-n", "--ntasks")

    def _find_capacities(self) -> Mapping[str, int]:
        if _find_words(self.words, ("-N", "--nodes", "-w", "--nodelist", "-x", "--exclude")):
            return {}  # The user has chosen nodes.
        nodes = expand_nodes(self.environment.get("SLURM_JOB_NODELIST", ""))
        per_node = expand_counts(self.environment.get("SLURM_TASKS_PER_NODE", ""))
        if each := _read_number(self.find_value("--ntasks-per-node")):
            per_node = [each] * len(nodes)
        elif total := _read_number(self.find_value(*self._RANKS)):
            share, rest = divmod(total, max(1, len(nodes)))
            per_node = [share + (index < rest) for index in range(len(nodes))]
        return dict(zip(nodes, per_node, strict=True)) if len(per_node) == len(nodes) else {}

    def list_hosts(self) -> list[str]:
        """Return the nodes of the allocation. SLURM removes nodes that it has found to be down."""
        job = self.environment["SLURM_JOB_ID"]
        listed = expand_nodes(read_output(["squeue", "--noheader", f"--jobs={job}", "--format=%N"]))
        return [host for host in self.capacities if host in listed or not listed]

    def make_probe(self, host: str) -> list[str]:
        """Return a command that starts a small job step on a host."""
        return [*make_small_step(host), "true"]

    def restrict(self, hosts: Sequence[str], ranks: int) -> list[str]:
        """Return the command line for a restart on these hosts.

        The step may overlap others, because SLURM counts the crashed step as running until it has
        found the node to be down.
        """
        if list(hosts) == list(self.capacities):
            return [self.words[0], "--overlap", *self.words[1:]]
        launcher, *others = _remove_options(self.words, (*self._RANKS, "--ntasks-per-node"))
        most = max(self.capacities[host] for host in hosts)
        options = [f"--nodes={len(hosts)}", f"--nodelist={','.join(hosts)}", f"--ntasks={ranks}"]
        return [launcher, "--overlap", *options, f"--ntasks-per-node={most}", *others]


class Mpirun(Launcher):
    """mpirun or mpiexec with a list of hosts, or with a file that lists them."""

    _LISTS = ("-hosts", "--hosts", "-host", "--host", "-H")
    _RANKS = ("-n", "-np", "--n", "--np")
    _RANKS_PER_HOST = ("-ppn", "--ppn", "-perhost", "--perhost")
    _FILES = ("-f", "-hostfile", "--hostfile", "-machinefile", "--machinefile")

    def _find_capacities(self) -> Mapping[str, int]:
        slots = _count_slots(self.find_value(*self._LISTS).split(","))
        if not slots:
            with suppress(OSError):
                file = Path(self.find_value(*self._FILES) or os.devnull)
                slots = _count_slots(file.read_text().splitlines())
        ranks = _read_number(self.find_value(*self._RANKS))
        each = _read_number(self.find_value(*self._RANKS_PER_HOST))
        each = each or -(-ranks // max(1, len(slots)))
        return {host: count or each for host, count in slots.items()}

    def list_hosts(self) -> list[str]:
        """Return all hosts of the job."""
        return list(self.capacities)

    def make_probe(self, host: str) -> list[str]:
        """Return a command that connects to a host as mpirun does. Empty: the host is this one."""
        if host.partition(".")[0] in ("localhost", socket.gethostname().partition(".")[0]):
            return []
        agent = self.find_value("-launcher-exec") or self.environment.get("HYDRA_LAUNCHER_EXEC", "")
        options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_SECONDS_TO_CONNECT}"]
        return [agent, host, "true"] if agent else ["ssh", *options, host, "true"]

    def restrict(self, hosts: Sequence[str], ranks: int) -> list[str]:
        """Return the command line for a restart, with the number of ranks of each host."""
        if list(hosts) == list(self.capacities):
            return list(self.words)
        names = (*self._LISTS, *self._FILES, *self._RANKS, *self._RANKS_PER_HOST)
        launcher, *others = _remove_options(self.words, names)
        is_open_mpi = "Open MPI" in read_output([self.words[0], "--version"])
        name = "--host" if is_open_mpi else "-hosts"
        slots = ",".join(f"{host}:{self.capacities[host]}" for host in hosts)
        return [launcher, name, slots, "-n", str(ranks), *others]


def find_launcher(words: Sequence[str], environment: Mapping[str, str]) -> Launcher | None:
    """Return the launcher of a command line; None unless it starts ranks on several known hosts."""
    name = Path(words[0]).name
    launcher: Launcher
    if name == "srun" and environment.get("SLURM_JOB_ID"):
        launcher = Srun(words, environment)
    elif name.startswith(("mpirun", "mpiexec")):
        launcher = Mpirun(words, environment)
    else:
        return None
    is_known = len(launcher.capacities) > 1 and all(launcher.capacities.values())
    return launcher if is_known else None


def _find_words(words: Sequence[str], names: Sequence[str]) -> tuple[int, int] | None:
    """Return the start and the end of the words of an option of the launcher and its value."""
    end = find_program(words)
    for index in range(1, end):
        word = words[index]
        if word in names and index + 1 < end:
            return index, index + 2
        short = re.fullmatch(r"(-[a-zA-Z])\d+", word)
        if word.partition("=")[0] in names or (short and short[1] in names):
            return index, index + 1
    return None


def _remove_options(words: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return a command line without these options of the launcher, and without their values."""
    left = list(words)
    while (position := _find_words(left, names)) is not None:
        del left[slice(*position)]
    return left


def find_program(words: Sequence[str]) -> int:
    """Return the index of the program in the command line of a launcher."""
    end = words.index("--") if "--" in words else len(words)
    for index in range(1, end):
        before = words[index - 1]
        if index > 2 and words[index - 2] in _PAIRS:
            continue
        is_flag = before in _FLAGS or "=" in before or re.fullmatch(r"-[a-zA-Z]\d+", before)
        is_value = index > 1 and before.startswith("-") and not is_flag
        if not words[index].startswith("-") and not is_value:
            return index
    return end


def _count_slots(entries: Sequence[str]) -> dict[str, int]:
    """Return the slots of each host in a list such as ``n1:4`` or ``n1 slots=4``; 0 if not given.

    A host that is repeated without slots, as in the file of PBS, has one slot per entry.
    """
    found: dict[str, int] = {}
    names: Counter[str] = Counter()
    for entry in entries:
        match = re.match(r"\s*([^\s:#]+)(?::(\d+)|.*?\bslots=(\d+))?", entry)
        if match:
            names[match[1]] += 1
            found[match[1]] = int(match[2] or match[3] or 0)
    if max(names.values(), default=0) > 1:
        return {host: slots or names[host] for host, slots in found.items()}
    return found


def _read_number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def find_option(words: Sequence[str], name: str) -> str | None:
    """Return the value of an option in a command line, or None. The last of several counts.

    Words after ``--`` belong to the user's own program.
    """
    value = None
    own = _cut_program(words)
    for word, following in zip(own, [*own[1:], ""], strict=True):
        if word == name:
            value = following
        elif word.startswith(name + "="):
            value = word[len(name) + 1 :]
    return value


def set_option(words: Sequence[str], name: str, *value: object) -> list[str]:
    """Return a command line with an option, so that its value counts. A switch has no value."""
    own = _cut_program(words)
    if not value and name in own:
        return list(words)
    return [*own, name, *map(str, value), *words[len(own) :]]


def _cut_program(words: Sequence[str]) -> list[str]:
    """Return the words before the ``--`` of a search, and not that of the launcher."""
    is_search = [word == "search" or word.endswith(".py") for word in words]
    start = is_search.index(True) if True in is_search else 0
    return list(words[: words.index("--", start)] if "--" in words[start:] else words)
