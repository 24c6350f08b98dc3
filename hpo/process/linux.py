"""Functions of Linux for processes: their parents, children, threads, memory and namespaces."""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import resource
import signal
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Lines of /proc/self/status that change by themselves. Another program may set the tracer, and
# libraries catch signals when they are first used (pdb, through readline).
_COUNTERS = re.compile(
    rb"^(Name|State|TracerPid|FDSize|Vm\w+|Rss\w+|HugetlbPages|Threads|Sig(Q|Pnd|Cgt)|ShdPnd|"
    rb"\w+_switches):.*\n",
    re.MULTILINE,
)
_LIMITS = 16  # RLIM_NLIMITS of Linux


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the thread that created it ends.

    Exit now if the process with the number `parent` has ended already. Raises OSError if the system
    refuses.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # The parent had ended before the call of prctl.
        os._exit(1)


def is_alive(process: int) -> bool:
    """Return whether the process with the number `process` is running on this host."""
    try:
        os.kill(process, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def adopt_orphans() -> None:
    """Let this process become the parent of its later descendants when their own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def find_children(process: int) -> list[int]:
    """Return the numbers of the child processes of the process with the number `process`."""
    found: list[int] = []
    with suppress(OSError, ValueError):
        for path in Path(f"/proc/{process}/task").glob("*/children"):
            found += map(int, path.read_text().split())
    return found


def find_output_files() -> set[tuple[int, int]]:
    """Return device and inode of the files to which this job prints, as far as they can be found.

    A launcher writes what a rank prints to a file, if a shell has redirected the launcher's output.
    """
    process = os.getpid()
    found = set()
    while process > 1:
        for descriptor in (1, 2):
            with suppress(OSError):
                status = Path(f"/proc/{process}/fd/{descriptor}").stat()
                found.add((status.st_dev, status.st_ino))
        process = find_parent(process)
    return found


def is_read_by_tee() -> bool:
    """Return whether a tee in a terminal reads this job's output, and Ctrl-C would end it."""
    outputs = find_output_files()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            if (folder / "comm").read_text() == "tee\n" and _is_interrupted_by_terminal(folder):
                status = (folder / "fd" / "0").stat()
                if (status.st_dev, status.st_ino) in outputs:
                    return True
    return False


def _is_interrupted_by_terminal(folder: Path) -> bool:
    """Return whether Ctrl-C in its terminal ends the process with this folder in /proc."""
    terminal = int(read_stat_fields(folder)[4])
    lines = (folder / "status").read_text().splitlines()
    ignored = next(int(line.split()[1], 16) for line in lines if line.startswith("SigIgn:"))
    return terminal != 0 and not ignored >> (signal.SIGINT - 1) & 1


def find_parent(process: int) -> int:
    """Return the parent of a process; 0 if it has none, or has ended."""
    with suppress(OSError):
        return int(read_stat_fields(Path(f"/proc/{process}"))[1])
    return 0


def read_command_line(process: int) -> list[str]:
    """Return the words of a process's command line; none if it has ended."""
    with suppress(OSError):
        return os.fsdecode(Path(f"/proc/{process}/cmdline").read_bytes()).split("\0")[:-1]
    return []


def read_stat_fields(folder: Path) -> list[str]:
    """Return the fields of `stat` after the name, which may have spaces, of a process or thread.

    It has this folder in /proc.
    """
    return (folder / "stat").read_text().rpartition(")")[2].split()


def count_cpu_ticks(process: int) -> int:
    """Return the CPU time of a process, in ticks of the kernel; 0 if it has ended."""
    with suppress(OSError):
        return sum(map(int, read_stat_fields(Path(f"/proc/{process}"))[11:13]))
    return 0


def has_children() -> bool:
    """Return whether this process has children. They count until they are waited for."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def count_threads() -> int:
    """Return the number of this process's threads, including threads of native code."""
    return len(list(Path("/proc/self/task").iterdir()))


def read_process_attributes() -> tuple[object, ...]:
    """Return what the kernel knows of this process: signals, cores, limits, priority and rights.

    Its name, its counters and its use of memory are left out.
    """
    status = _COUNTERS.sub(b"", Path("/proc/self/status").read_bytes())
    limits = [resource.getrlimit(number) for number in range(_LIMITS)]
    return status, limits, os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)


def read_descriptors() -> dict[int, tuple[int, int, int]]:
    """Return the open file descriptors, each with its file's device and inode, and its flags."""
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names, without a Path of each
        with suppress(OSError):  # The descriptor of this list is closed.
            status = os.fstat(int(name))
            flags = fcntl.fcntl(int(name), fcntl.F_GETFL)
            found[int(name)] = (status.st_dev, status.st_ino, flags)
    return found


def raise_oom_score() -> None:
    """Let the kernel kill this process before others if memory is short."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def count_memory_kills() -> int:
    """Return how many processes of this host and cgroup the kernel has killed to free memory."""
    count = 0
    paths = [Path("/proc/vmstat")]
    with suppress(OSError):
        groups = Path("/proc/self/cgroup").read_text().splitlines()
        own = [line[4:] for line in groups if line.startswith("0::/")]
        paths += [Path("/sys/fs/cgroup", group, "memory.events") for group in own]
    for path in paths:
        with suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                if line.startswith("oom_kill "):
                    count += int(line.split()[1])
    return count


def identify_pid_namespace() -> str:
    """Return a text that is the same for processes that see each other in /proc."""
    space = "?"
    with suppress(OSError):
        space = str(Path("/proc/self/ns/pid").readlink())
    return f"{os.uname().nodename} {space}"


def identify_container() -> str:
    """Return a text that is equal for processes that share a host, namespaces and a cgroup."""
    parts = [os.uname().nodename]
    for kind in ("pid", "net", "mnt", "user"):
        with suppress(OSError):
            parts.append(str(Path(f"/proc/self/ns/{kind}").readlink()))
    with suppress(OSError):
        parts.append(Path("/proc/self/cgroup").read_text())
    return "\n".join(parts)


def count_threads_per_core() -> int:
    """Return the number of hardware threads of a physical CPU core; 1 if it is unknown."""
    with suppress(OSError):
        siblings = Path("/sys/devices/system/cpu/cpu0/topology/core_cpus").read_text()
        return max(1, int(siblings.replace(",", ""), 16).bit_count())
    return 1


def has_gpu_files() -> bool:
    """Return whether this host has the device files of a GPU of NVIDIA or AMD."""
    return any(any(Path("/dev").glob(pattern)) for pattern in ("nvidia[0-9]*", "kfd"))
