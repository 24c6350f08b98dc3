"""A SLURM cluster of one controller and several nodes on this machine, for tests.

Each machine of the cluster is a set of Linux namespaces (network, host name, mounts, processes).
SIGKILL to its first process ends all of its processes at once, as when a node loses power. That
process also ends when the test process does, so nothing remains: no process, no network, no mount.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.launch import ROOT

CONTROLLER = "controller"
NODES = ("n1", "n2", "n3")
SECONDS_TO_START = 60
SECONDS_TO_DETECT = 10  # without an answer of a node, until SLURM declares it down

_NO_VARIABLES: Mapping[str, str] = {}

# TEST-NET-3 of RFC 5737, which is reserved for documentation.
_NETWORK = "203.0.113."
_CGROUPS = Path("/sys/fs/cgroup")
_TOOLS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "munged": "munge",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ip": "iproute2",
    "unshare": "util-linux",
    "hostname": "hostname",
}

_SLURM_CONF = """
ClusterName=test
SlurmctldHost=controller
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/{process_tracker}
TaskPlugin={task_plugins}
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
SlurmdTimeout={seconds_to_detect}
MessageTimeout=5
KillWait=5
MinJobAge=600
OverTimeLimit=0
SchedulerParameters=bf_interval=1,sched_min_interval=100000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={nodes} CPUs={cores} RealMemory=4000 Gres=gpu:4
PartitionName=batch Nodes={nodes} Default=YES State=UP PriorityTier=1 GraceTime=3 MaxTime=UNLIMITED
PartitionName=urgent Nodes={nodes} State=UP PriorityTier=9 PreemptMode=OFF MaxTime=UNLIMITED
"""


def find_missing_requirement() -> str:
    """Return why the cluster cannot be simulated here; an empty text if it can."""
    if os.geteuid():
        return "a simulated cluster needs root"
    packages = sorted({package for tool, package in _TOOLS.items() if not _find_tool(tool)})
    if packages:
        return (
            "a simulated cluster needs: apt-get install --no-install-recommends "
            f"{' '.join(packages)}"
        )
    probe = subprocess.run(
        [
            "unshare",
            "--net",
            "--uts",
            "--mount",
            "--pid",
            "--fork",
            "ip",
            "link",
            "add",
            "switch",
            "type",
            "bridge",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    return f"no namespaces here: {probe.stderr.strip()}" if probe.returncode else ""


def _find_tool(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def _remove_cgroup(group: Path) -> None:
    """Remove a cgroup without processes, and those in it."""
    for path in group.iterdir():
        if path.is_dir():
            _remove_cgroup(path)
    group.rmdir()


@dataclass
class Machine:
    """One machine of the cluster: the processes in its namespaces."""

    process: subprocess.Popen[bytes]
    """The process `unshare`, of which the first process of the machine is the child."""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    """Processes that were started on the machine."""

    @property
    def first_pid(self) -> int:
        """The process ID, in the namespace of the test, of the first process of the machine."""
        children = (
            Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        )
        return int(children[0])

    def kill(self) -> None:
        """Kill all processes of the machine at once."""
        with suppress(ProcessLookupError, FileNotFoundError, IndexError):
            os.kill(self.first_pid, signal.SIGKILL)
        self.process.kill()
        for process in (self.process, *self.processes):
            process.wait(20)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class SlurmCluster:
    """A SLURM cluster on this machine. Use it as a context manager: it is removed at the end.

    Args:
        binds_cores: Whether SLURM binds each task to cores of its own, with cgroups if this machine
            has version 1 of them. A node then has only the cores of this machine. Otherwise, SLURM
            believes that it has 32 cores.

    Attributes:
        folder: A directory that all machines share.
        has_cgroups: Whether SLURM binds tasks with cgroups.
    """

    def __init__(self, binds_cores: bool = False) -> None:
        self._binds_cores = binds_cores
        self.has_cgroups = binds_cores and all(
            os.access(_CGROUPS / name, os.W_OK) for name in ("freezer", "cpuset")
        )
        # Not in a pytest directory: the path of a socket has at most 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="hpo-cluster-", dir="/var/tmp"))
        self._machines: dict[str, Machine] = {}

    def __enter__(self) -> SlurmCluster:
        try:
            self._write_files()
            self._start_controller()
            for node in NODES:
                self.start_node(node)
            self.wait_for_nodes()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for machine in self._machines.values():
            machine.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.has_cgroups:
            for group in [path for node in NODES for path in _CGROUPS.glob(f"*/slurm_{node}")]:
                _remove_cgroup(group)

    # Machines

    def start_node(self, name: str) -> None:
        """Start a node, as after a reboot."""
        self._start_machine(name)
        self._start_daemon(name, "slurmd", "-D", "-N", name)
        self._start_daemon(name, "sshd", "-D", "-e", "-f", str(self.folder / "sshd_config"))

    def kill_node(self, name: str) -> None:
        """Kill all processes of a node at once, and disconnect it."""
        self._machines.pop(name).kill()

    def wait_for_nodes(self) -> None:
        """Wait until SLURM can use all nodes."""

        def are_usable() -> bool:
            states = self.run("sinfo", "-h", "-N", "-p", "batch", "-o", "%T").stdout.split()
            return len(states) == len(NODES) and set(states) <= {"idle", "mixed", "allocated"}

        wait_until(are_usable, SECONDS_TO_START, self.read_logs)

    def run(
        self,
        *command: object,
        on: str = CONTROLLER,
        timeout: float = 60,
        variables: Mapping[str, str] = _NO_VARIABLES,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a machine to its end."""
        return subprocess.run(
            self._make_command(on, command),
            env=self._make_environment(variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )

    def start(self, *command: object, on: str) -> subprocess.Popen[bytes]:
        """Start a command on a machine. Its output is in `MACHINE.out`."""
        with (self.folder / f"{on}.out").open("ab") as output:
            process = subprocess.Popen(
                self._make_command(on, command),
                env=self._make_environment({}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self._machines[on].processes.append(process)
        return process

    def submit(
        self, script: str, *options: object, name: str = "search.sh", **variables: str
    ) -> str:
        """Submit a job script in the shared directory, and return the number of the job.

        Its output is in `NAME.out`. Job scripts find the environment of the tests in
        "$HOME/venvs/hpo", and a command `module` that does nothing.
        """
        (self.folder / name).write_text(script)
        given = {"SBATCH_OUTPUT": f"{self.folder}/{name}.out", "SBATCH_OPEN_MODE": "append"}
        given |= {"SCRATCH": str(self.folder), "BASH_FUNC_module%%": "() { :; }", **variables}
        done = self.run("sbatch", "--parsable", *options, name, variables=given)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def list_jobs(self) -> str:
        """Return the jobs that have not ended: number, state and nodes."""
        return self.run("squeue", "--noheader", "--format=%i %T %N").stdout

    def wait_for_jobs(self, seconds: float, output: str = "search.sh.out") -> str:
        """Wait until no job is left. Return the output of the job script."""

        def describe() -> str:
            return f"{self.list_jobs()}\n{self.read_output(output)}\n{self.read_logs()}"

        wait_until(lambda: not self.list_jobs(), seconds, describe)
        return self.read_output(output)

    def read_output(self, name: str = "search.sh.out") -> str:
        """Return the output of a job script so far."""
        path = self.folder / name
        return path.read_text() if path.exists() else ""

    def read_logs(self) -> str:
        """Return the ends of the logs of SLURM, for messages of failed tests."""
        return "\n".join(
            f"{path.name}:\n{path.read_text()[-2000:]}"
            for path in sorted(self.folder.glob("*.log"))
        )

    def _make_command(self, machine: str, command: tuple[object, ...]) -> list[str]:
        enter = ["nsenter", "--target", str(self._machines[machine].first_pid), "--all"]
        return [*enter, f"--wd={self.folder}", *map(str, command)]

    def _make_environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM_", "PYTEST_"))
        }
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin"
        configuration = {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": path,
            "PYTHONPATH": str(ROOT),
        }
        return {
            **kept,
            **configuration,
            "HOME": str(self.folder / "home"),
            "TMPDIR": "/tmp",
            **variables,
        }

    # Start

    def _write_files(self) -> None:
        folder = self.folder
        folder.chmod(0o755)
        for name in ("state", "home", "home/.ssh", "home/venvs"):
            (folder / name).mkdir(mode=0o700)
        (folder / "home" / "venvs" / "hpo").symlink_to(sys.prefix)
        (folder / "hosts").write_text(
            "127.0.0.1 localhost\n"
            + "".join(
                f"{_NETWORK}{number} {name}\n"
                for number, name in enumerate((CONTROLLER, *NODES), start=1)
            )
        )
        (folder / "slurm.conf").write_text(
            _SLURM_CONF.format(
                folder=folder,
                nodes=",".join(NODES),
                seconds_to_detect=SECONDS_TO_DETECT,
                task_plugins=self._choose_task_plugins(),
                process_tracker="cgroup" if self.has_cgroups else "linuxproc",
                cores=os.cpu_count() if self._binds_cores else 32,
            )
        )
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nConstrainCores=yes\n")
        for number in range(4):
            # SLURM requires that the files of GPUs are devices.
            (folder / f"gpu{number}").symlink_to("/dev/null")
        (folder / "gres.conf").write_text(
            f"NodeName={','.join(NODES)} Name=gpu File={folder}/gpu[0-3]\n"
        )
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        # Nodes share /tmp here, so the sockets of PMIx on them need another directory.
        (folder / "mpi.conf").write_text("PMIxCliTmpDirBase=/run\n")
        self._write_ssh_files()

    def _choose_task_plugins(self) -> str:
        if not self._binds_cores:
            return "task/none"
        return "task/affinity,task/cgroup" if self.has_cgroups else "task/affinity"

    def _write_ssh_files(self) -> None:
        folder, home = self.folder, self.folder / "home" / ".ssh"
        for key in (folder / "host_key", home / "id_ed25519"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)]
            subprocess.run(command, check=True, timeout=20)
        shutil.copy(home / "id_ed25519.pub", folder / "authorized_keys")
        (folder / "sshd_config").write_text(
            f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/authorized_keys\nPidFile "
            "none\nPermitRootLogin yes\nStrictModes no\nUsePAM no\n"
        )
        (folder / "ssh_config").write_text(
            f"IdentityFile {home}/id_ed25519\nStrictHostKeyChecking no\nUserKnownHostsFile "
            "/dev/null\nLogLevel ERROR\nBatchMode yes\n"
        )

    def _start_controller(self) -> None:
        self._start_machine(CONTROLLER)
        munge = ["--foreground", "--force", "--socket", self.folder / "munge.socket"]
        files = [
            f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "log", "seed")
        ]
        self._start_daemon(CONTROLLER, "munged", *map(str, [*munge, *files]))
        wait_until((self.folder / "munge.socket").exists, SECONDS_TO_START, self.read_logs)
        self._start_daemon(CONTROLLER, "slurmctld", "-D")

    def _start_machine(self, name: str) -> None:
        number = (CONTROLLER, *NODES).index(name) + 1
        files = {"hosts": "/etc/hosts", "ssh_config": "/etc/ssh/ssh_config"}
        mounts = [f"mount --bind {self.folder}/{name} {path}" for name, path in files.items()]
        mounts += [f"mount -t tmpfs none {path}" for path in ("/run", "/dev/shm")]
        # The first process ends when its standard input is closed, so when the test process has
        # ended.
        steps = [
            f"hostname {name}",
            *mounts,
            "mkdir /run/sshd",
            "ip link set lo up",
            "echo ready",
            "read -r _",
        ]
        namespaces = (
            "--net",
            "--uts",
            "--ipc",
            "--mount",
            "--pid",
            "--mount-proc",
            "--fork",
            "--kill-child",
        )
        process = subprocess.Popen(
            ["unshare", *namespaces, "bash", "-c", " && ".join(steps)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._make_environment({}),
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n", f"{name} cannot be started"
        self._machines[name] = machine = Machine(process)
        if name == CONTROLLER:  # It also has the network switch.
            self._configure(
                f"ip link add switch type bridge && ip addr add {_NETWORK}1/24 dev switch"
            )
            self._configure("ip link set switch up")
        else:
            self._configure(f"ip link del {name}", check=False)
            self._configure(f"ip link add {name} type veth peer name eth0")
            self._configure(f"ip link set {name} master switch up")
            # The process IDs of the test are unknown in the controller's namespace, so its network
            # is entered alone.
            controller = self._machines[CONTROLLER].first_pid
            move = [
                "nsenter",
                "--target",
                str(controller),
                "--net",
                "ip",
                "link",
                "set",
                "eth0",
                "netns",
            ]
            subprocess.run([*move, str(machine.first_pid)], check=True, timeout=20)
            self._configure(
                f"ip addr add {_NETWORK}{number}/24 dev eth0 && ip link set eth0 up", on=name
            )

    def _configure(self, script: str, on: str = CONTROLLER, check: bool = True) -> None:
        done = self.run("bash", "-c", script, on=on)
        assert done.returncode == 0 or not check, f"{script}: {done.stderr}"

    def _start_daemon(self, machine: str, program: str, *arguments: str) -> None:
        path = _find_tool(program)  # sshd must be started by its whole path
        assert path is not None
        self.start(path, *arguments, on=machine)


def wait_until(
    is_done: Callable[[], bool], seconds: float, describe: Callable[[], str] = lambda: ""
) -> None:
    """Wait until `is_done()` is true.

    After `seconds`, fail the test with the text of `describe()`.
    """
    end = time.monotonic() + seconds
    while not is_done():
        assert time.monotonic() < end, f"not true after {seconds} s\n{describe()}"
        time.sleep(0.2)
