"""The template: a process that imports torch and the search file once, and from which trainers are forked.

The template is started as a new program before its rank initialises MPI. It computes nothing, since
a process in which OpenMP, autograd or CUDA has run is not safe to fork. Several ranks of a host may
use one template. Each rank has its own connection.
"""

from __future__ import annotations

import ast
import base64
import ctypes
import faulthandler
import gc
import importlib.util
import os
import re
import select
import signal
import socket
import struct
import sys
import sysconfig
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hpo.errors import UsageError
from hpo.process.channel import Channel, ChannelClosed, Message
from hpo.process.linux import adopt_orphans, count_threads, end_with_parent, find_children
from hpo.trainer.forks import IGNORED_SIGNALS
from hpo.trainer.search_file import SearchFile, SearchSource, load_search_file

_IDLE_SECONDS = 0.01
_CREDENTIALS = struct.Struct("3i")
_EFFECTLESS_STATEMENTS = (ast.FunctionDef, ast.ClassDef, ast.Try)


@dataclass(frozen=True)
class _Child:
    process: int
    owner: Channel


class TemplateServer:
    """Forks trainers for the ranks that connect to the socket `listener`, and answers their requests.

    The import of the search file may make this process unsafe to fork, for example if it starts a
    thread. This process then replaces itself by a new process, which gets the file as `cold`, and
    each trainer imports the file. If a script imports a package with this effect, each trainer
    imports that package; `skipped` maps such packages to the reasons.
    """

    def __init__(
        self,
        listener: socket.socket,
        cold: SearchSource | None = None,
        skipped: Mapping[str, str] | None = None,
    ) -> None:
        self._listener = listener
        self._channels: list[Channel] = []
        self._children: dict[int, _Child] = {}
        self._file: SearchFile | None = None
        self._unimported_search = cold
        self._skipped = dict(skipped or {})
        self._assignments: list[str] = []
        self._data = -1  # The descriptor of the data that `prepare` returned.
        self._requester = 0  # The index of the connection whose request is being answered.
        self._has_preloaded = self._has_forked = False
        # Processes that the import of the search file has started.
        self._foreign_children = set(find_children(os.getpid()))
        self._wakeup_reader, self._wakeup_writer = os.pipe()
        for end in (self._wakeup_reader, self._wakeup_writer):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup_writer, warn_on_full_buffer=False)
        self._answers: Mapping[str, Callable[[Message], dict[str, Any]]] = {
            "load": self._load_search_file,
            "check_setting": self._check_setting,
            "bind": self._bind_settings,
            "keep_data": self._keep_data,
        }

    def serve(self) -> None:
        """Answer requests until the process ends."""
        while True:
            waiting: list[Any] = [self._listener, self._wakeup_reader, *self._channels]
            ready = select.select(waiting, [], [], _IDLE_SECONDS if self._may_preload else None)[0]
            if not ready:
                self._preload_compiler()
            if self._wakeup_reader in ready:
                with suppress(BlockingIOError):
                    os.read(self._wakeup_reader, 4096)
                self._reap_trainers()
            if self._listener in ready:
                self._accept_connection()
            for channel in [channel for channel in self._channels if channel in ready]:
                try:
                    while (message := channel.receive(0)) is not None:
                        self._answer_request(channel, message)
                except ChannelClosed:  # noqa: PERF203 - The other connections stay open.
                    self._drop_connection(channel)

    @property
    def _may_preload(self) -> bool:
        """Whether to import torch's compiler while idle. If the file has a `prepare`, a trainer must exist before."""
        has_prepare = self._file is not None and self._file.prepare is not None
        return (
            self._file is not None
            and not self._has_preloaded
            and (self._has_forked or not has_prepare)
        )

    def _accept_connection(self) -> None:
        connection, _ = self._listener.accept()
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(peer)[1] == os.getuid():
            self._channels.append(Channel(connection))
        else:
            connection.close()

    def _drop_connection(self, channel: Channel) -> None:
        """Close the connection to a rank, and kill the trainers of this rank."""
        self._channels.remove(channel)
        channel.close()
        for child in self._children.values():
            if child.owner is channel:
                os.kill(child.process, signal.SIGKILL)

    def _answer_request(self, channel: Channel, message: Message) -> None:
        if message.kind == "spawn":
            self._spawn_trainer(channel, message)
        elif message.kind == "fetch_data":
            channel.send("data", [self._data] if self._data >= 0 else [])
        else:
            self._requester = self._channels.index(channel)
            try:
                channel.send("answer", **self._answers[message.kind](message))
            except UsageError as error:
                channel.send("mistake", text=ValueError.__str__(error))
            if message.kind == "bind" and self._unimported_search is not None:
                self._restart_process(self._unimported_search, "cold")

    def bind_again(self, search: SearchSource, requester: int) -> None:
        """After a restart, load the search file, and answer the "bind" request of the connection number `requester`."""
        self._file = load_search_file(search.path, search.source)
        self._answer_request(
            self._channels[requester], Message("bind", {"assignments": search.assignments})
        )

    def _load_search_file(self, message: Message) -> dict[str, Any]:
        source = base64.b64decode(message["source"]) if "source" in message.content else None
        self._file = load_search_file(Path(message["path"]), source)
        return self._file.describe()

    def _check_setting(self, message: Message) -> dict[str, Any]:
        assert self._file is not None
        self._file.check_setting(message["assignment"])
        return {}

    def _bind_settings(self, message: Message) -> dict[str, Any]:
        """Make the settings of later trainers, and return the answer to send. Import a Python script's packages."""
        assert self._file is not None
        self._assignments = list(message["assignments"])
        answer = self._file.make_setting_values(self._assignments)
        self._foreign_children = set(find_children(os.getpid()))
        if unsafe := find_fork_hazard():
            self._unimported_search = self._make_search_source()
        else:
            self._import_packages()
        gc.freeze()
        return {**answer, "unsafe": unsafe, "skipped": self._skipped}

    def _make_search_source(self) -> SearchSource:
        assert self._file is not None
        return SearchSource(self._file.path, self._file.source, self._assignments)

    def _import_packages(self) -> None:
        """Import the packages of a script. If a package makes the template unsafe to fork, restart the template.

        The restarted template imports all packages except this one, and answers the "bind" request
        of the rank.
        """
        if self._file is None or (path := self._file.program) is None:
            return
        for package in import_packages(path, self._file.program_source, self._skipped):
            if hazard := find_fork_hazard():
                self._skipped[package] = hazard
                self._restart_process(self._make_search_source(), "source")

    def _keep_data(self, message: Message) -> dict[str, Any]:
        (self._data,) = message.descriptors
        return {}

    def _restart_process(self, search: SearchSource, kind: str) -> NoReturn:
        """Replace this process by one that has not imported the search file, and keep all connections.

        If the `kind` is "cold", trainers import the file. If it is "source", the new process
        imports the file.
        """
        for number in (self._listener.fileno(), *(channel.fileno() for channel in self._channels)):
            os.set_inheritable(number, True)
        source = os.memfd_create("hpo-source", 0)
        os.write(source, search.source)
        state = {
            "listener": self._listener.fileno(),
            "channels": [channel.fileno() for channel in self._channels],
            kind: [str(search.path), source, search.assignments],
            "skipped": self._skipped,
            "asker": self._requester,
        }
        from hpo.process.launcher import make_template_command

        sys.stdout.flush()
        os.execv(sys.executable, make_template_command(state))  # noqa: S606 - this program itself

    def _preload_compiler(self) -> None:
        self._has_preloaded = True
        import_compiler()
        gc.freeze()  # Garbage collection in trainers is faster without these objects.

    def _spawn_trainer(self, channel: Channel, message: Message) -> None:
        if message["trains"] and not self._has_preloaded:
            self._preload_compiler()
        template = os.getpid()
        try:
            process = os.fork()
        except OSError as error:
            for number in message.descriptors:
                os.close(number)
            channel.send("mistake", text=f"a trainer cannot be forked: {error.strerror}")
            return
        if process == 0:
            self._become_trainer(template, message)
        for number in message.descriptors:
            os.close(number)
        self._children[process] = _Child(process, channel)
        self._has_forked = True
        channel.send("spawned", process=process)

    def _become_trainer(self, template: int, message: Message) -> None:
        """Serve a rank in a process that was forked from the template with process id `template`. Does not return."""
        status = 1
        try:
            end_with_parent(template)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(self._wakeup_reader)
            os.close(self._wakeup_writer)
            for channel in self._channels:
                channel.close()
            self._listener.close()
            from hpo.trainer.trainer_server import serve_trainer

            serve_trainer(
                message, self._file, self._unimported_search or self._assignments, self._data
            )
            status = 0
        except ChannelClosed:
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _reap_trainers(self) -> None:
        """Report ended trainers to their ranks, and kill the processes that these trainers have left behind."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            child = self._children.pop(ended.si_pid, None)
            if child is not None:
                with suppress(ProcessLookupError, PermissionError):
                    # The process id is not reused before waitpid.
                    os.killpg(child.process, signal.SIGKILL)
            _, status = os.waitpid(ended.si_pid, 0)
            # The children of killed orphans are found next time.
            for orphan in find_children(os.getpid()):
                if orphan not in self._children and orphan not in self._foreign_children:
                    with suppress(ProcessLookupError):
                        os.kill(orphan, signal.SIGKILL)
            if child is not None:
                with suppress(ChannelClosed):
                    child.owner.send(
                        "ended", process=child.process, status=os.waitstatus_to_exitcode(status)
                    )


def import_packages(path: Path, source: bytes, skipped: Container[str]) -> Iterator[str]:
    """Import the installed packages that a script imports, except `skipped`, and yield each name after its import.

    Only imports at the top of the script are found. Packages that cannot be imported are ignored,
    since the script reports the error when it runs.
    """
    with suppress(SyntaxError, ValueError):
        for module, names in _find_imports(ast.parse(source)):
            package = module.partition(".")[0]
            if package not in skipped and _is_installed(module, path.absolute().parent):
                with suppress(Exception, SystemExit):
                    imported = importlib.import_module(module)
                    # Some packages, such as transformers, import a module when its name is read.
                    for name in names:
                        getattr(imported, name, None)
                yield package


def find_fork_hazard() -> str:
    """Return the reason why this process is unsafe to fork; an empty text if it is safe."""
    threads = count_threads() - 1
    if threads:
        return f"it starts {threads} thread{'s' if threads > 1 else ''}"
    return "it asks the driver of the GPUs" if _has_asked_driver() or _is_bad_fork() else ""


def _has_asked_driver() -> bool:
    """Return whether this process has initialised CUDA or ROCm, with torch or with another library."""
    files: list[str] = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # The descriptor of this list is already closed.
            files.append(str(path.readlink()))
    # NVML, which does not prevent a fork, opens only /dev/nvidiactl.
    return any(re.fullmatch(r"/dev/(nvidia-uvm|nvidia\d+|kfd)", file) for file in files)


def _is_bad_fork() -> bool:
    """Return whether torch could not use its accelerator in a process that is forked from this one."""
    import torch

    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return False
    child = os.fork()
    if child == 0:
        status = 1
        with suppress(BaseException):
            status = int(getattr(torch.get_device_module(kind), "_is_in_bad_fork", lambda: False)())
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0


def _find_imports(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """Yield the modules that a script imports at its top, and the names that it imports from each.

    The search ends at the first statement that is not an import, a definition, a `try` or a
    constant. Such a statement may set an environment variable for later imports.
    """
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0 and node.module:
                yield node.module, [alias.name for alias in node.names]
        elif not isinstance(node, _EFFECTLESS_STATEMENTS) and not (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            return


def _is_installed(name: str, folder: Path) -> bool:
    """Return whether a module belongs to an installed package, and not to the user's files in `folder`."""
    root = name.partition(".")[0]
    if (folder / root).exists() or (folder / f"{root}.py").exists():
        return False
    with suppress(ImportError, ValueError, AttributeError):
        spec = importlib.util.find_spec(root)
        origin = spec.origin if spec is not None else None
        folders = [sysconfig.get_path(kind) for kind in ("purelib", "platlib")]
        return origin is not None and any(Path(origin).is_relative_to(folder) for folder in folders)
    return False


def import_torch() -> None:
    """Import torch and the modules of trainers, and replace torch's `init_process_group`.

    The search file may import this function of torch by name, so call `import_torch` before that.
    """
    import torch.nn.parallel  # noqa: F401 - Most search files use it.

    from hpo.trainer import trainer_group, trainer_server  # noqa: F401 - forked trainers use them

    trainer_group.replace_init_process_group()
    keep_freed_memory()


def import_compiler() -> None:
    """Import torch's compiler (0.8 s). Without this, optimizers and DistributedDataParallel import it on first use."""
    import torch._dynamo  # noqa: F401


def keep_freed_memory() -> None:
    """Configure glibc to keep freed memory for later use, so that training steps need not request new pages.

    With 8 ranks on 2 cores, this reduces the system time of 16 trainings from 3.5 s to 0.5 s.
    """
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
        libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD; glibc accepts at most 32 MiB.


def main(state: Mapping[str, Any]) -> None:
    """Run a template. `state` comes from `hpo.process.launcher`, or from the previous process at a restart."""
    if "parent" in state:
        end_with_parent(state["parent"])
    adopt_orphans()
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    gc.disable()  # Imports create many objects that are never freed.
    import_torch()
    template = TemplateServer(
        socket.socket(fileno=state["listener"]),
        SearchSource.read(state.get("cold")),
        state.get("skipped"),
    )
    template._channels = [
        Channel(socket.socket(fileno=number)) for number in state.get("channels", ())
    ]
    if (search := SearchSource.read(state.get("source"))) is not None:
        template.bind_again(search, state["asker"])
    template.serve()
