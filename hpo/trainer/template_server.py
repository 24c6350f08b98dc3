"""The template: a process that imports torch and the search file once, and forks trainers.

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
import warnings
import weakref
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from hpo.errors import UsageError
from hpo.process.channel import Channel, ChannelClosed, Message
from hpo.process.launcher import make_template_command
from hpo.process.linux import adopt_orphans, count_threads, end_with_parent, find_children
from hpo.trainer.search_file import SearchSource, load_search_file
from hpo.trainer.signals import IGNORED_SIGNALS

_IDLE_SECONDS = 0.01
_CREDENTIALS = struct.Struct("3i")
_EFFECTLESS_STATEMENTS = (ast.FunctionDef, ast.ClassDef, ast.Try)


class TemplateServer:
    """Forks trainers for the ranks that connect to the socket `listener`.

    The import of the search file may make this process unsafe to fork, for example if it starts a
    thread. This process then replaces itself by a "cold" one, and each trainer imports the file. If
    a script imports a package with this effect, each trainer imports that package; `skipped` maps
    such packages to the reasons.
    """

    def __init__(self, listener: socket.socket, skipped: Mapping[str, str] | None = None) -> None:
        self._listener = listener
        self._channels: list[Channel] = []
        self._owners: dict[int, Channel] = {}  # The ranks of the trainers, by process id.
        self._search: SearchSource | None = None
        self._is_cold = False
        self._skipped = dict(skipped or {})
        self._data = -1  # The descriptor of the data that `prepare` returned.
        self._has_preloaded = self._has_forked = False
        # Processes that the import of the search file has started.
        self._foreign_children = set(find_children(os.getpid()))
        self._wakeup_reader, self._wakeup_writer = os.pipe()
        for end in (self._wakeup_reader, self._wakeup_writer):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup_writer, warn_on_full_buffer=False)

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue after a restart with `state` (see `_restart_process`).

        A process that is not cold now answers the request "bind", during which it was restarted.
        """
        self._channels = [Channel(socket.socket(fileno=number)) for number in state["channels"]]
        path, source, assignments = state["search"]
        content = os.pread(source, os.fstat(source).st_size, 0)
        self._search = SearchSource(Path(path), content, assignments)
        self._is_cold = state["is_cold"]
        if not self._is_cold:
            message = Message("bind", {"assignments": assignments})
            self._answer_request(self._channels[state["requester"]], message)

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
                while process := _find_ended_child():
                    self._reap_trainer(process)
            if self._listener in ready:
                connection, _ = self._listener.accept()
                size = _CREDENTIALS.size
                peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
                if _CREDENTIALS.unpack(peer)[1] == os.getuid():
                    self._channels.append(Channel(connection))
                else:
                    connection.close()
            for channel in [channel for channel in self._channels if channel in ready]:
                try:
                    while (message := channel.receive(0)) is not None:
                        self._answer_request(channel, message)
                except ChannelClosed:  # noqa: PERF203 - The other connections stay open.
                    self._drop_connection(channel)

    @property
    def _may_preload(self) -> bool:
        """Whether to import torch's compiler while idle; a trainer for `prepare` comes first."""
        if self._search is None or self._is_cold or self._has_preloaded:
            return False
        return self._has_forked or self._search.load_file().prepare is None

    def _drop_connection(self, channel: Channel) -> None:
        """Close the connection to a rank, and kill the trainers of this rank."""
        self._channels.remove(channel)
        channel.close()
        for process, owner in self._owners.items():
            if owner is channel:
                os.kill(process, signal.SIGKILL)

    # Requests

    def _answer_request(self, channel: Channel, message: Message) -> None:
        try:
            getattr(self, f"_on_{message.kind}")(channel, message)
        except UsageError as error:
            channel.send("mistake", text=ValueError.__str__(error))

    def _on_load(self, channel: Channel, message: Message) -> None:
        """Import the search file, and describe it."""
        source = base64.b64decode(message["source"]) if "source" in message.content else None
        file = load_search_file(Path(message["path"]), source)
        self._search = SearchSource(file.path, file.source, [])
        channel.send("answer", **file.describe())

    def _on_check_setting(self, channel: Channel, message: Message) -> None:
        assert self._search is not None
        self._search.load_file().check_setting(message["assignment"])
        channel.send("answer")

    def _on_bind(self, channel: Channel, message: Message) -> None:
        """Make the settings of later trainers, and import a Python script's packages."""
        assert self._search is not None
        self._search = replace(self._search, assignments=list(message["assignments"]))
        values = self._search.load().values
        self._foreign_children = set(find_children(os.getpid()))
        unsafe = find_fork_hazard()
        file = self._search.load_file()
        if not unsafe and file.program is not None:
            for package in import_packages(file.program, file.program_source, self._skipped):
                if hazard := find_fork_hazard():
                    # The new process imports the other packages, and answers this request.
                    self._skipped[package] = hazard
                    self._restart_process(channel, is_cold=False)
        gc.freeze()
        channel.send("answer", values=values, unsafe=unsafe, skipped=self._skipped)
        if unsafe:
            self._restart_process(channel, is_cold=True)

    def _on_keep_data(self, channel: Channel, message: Message) -> None:
        (self._data,) = message.descriptors
        channel.send("answer")

    def _on_fetch_data(self, channel: Channel, _: Message) -> None:
        channel.send("data", [self._data] if self._data >= 0 else [])

    def _on_spawn(self, channel: Channel, message: Message) -> None:
        if message["trains"] and not self._has_preloaded:
            self._preload_compiler()
        template = os.getpid()
        try:
            process = os.fork()
            if process == 0:
                self._become_trainer(template, message)
        except OSError as error:
            raise UsageError(f"a trainer cannot be forked: {error.strerror}") from error
        finally:
            for number in message.descriptors:
                os.close(number)
        self._owners[process] = channel
        self._has_forked = True
        channel.send("spawned", process=process)

    def _restart_process(self, requester: Channel, *, is_cold: bool) -> NoReturn:
        """Replace this process by one that has imported nothing, and keep all connections.

        If `is_cold`, only trainers import the search file. Otherwise, the new process imports it.
        """
        assert self._search is not None
        for number in (self._listener.fileno(), *(channel.fileno() for channel in self._channels)):
            os.set_inheritable(number, True)
        source = os.memfd_create("hpo-source", 0)
        os.write(source, self._search.source)
        state = {
            "listener": self._listener.fileno(),
            "channels": [channel.fileno() for channel in self._channels],
            "search": [str(self._search.path), source, self._search.assignments],
            "is_cold": is_cold,
            "skipped": self._skipped,
            "requester": self._channels.index(requester),
        }
        sys.stdout.flush()
        os.execv(sys.executable, make_template_command(state))  # noqa: S606 - this program itself

    def _preload_compiler(self) -> None:
        self._has_preloaded = True
        import_compiler()
        gc.freeze()  # Garbage collection in trainers is faster without these objects.

    # Trainers

    def _become_trainer(self, template: int, message: Message) -> NoReturn:
        """Serve a rank in this process, which was forked from the process `template`."""
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
            _leave_finalizers()
            from hpo.trainer.trainer_server import serve_trainer

            serve_trainer(message, self._search, self._data)
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

    def _reap_trainer(self, process: int) -> None:
        """Report an ended trainer to its rank, and kill the processes that it has left behind."""
        owner = self._owners.pop(process, None)
        if owner is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process, signal.SIGKILL)  # The id is not reused before waitpid.
        _, status = os.waitpid(process, 0)
        # The children of killed orphans are found next time.
        for orphan in find_children(os.getpid()):
            if orphan not in self._owners and orphan not in self._foreign_children:
                with suppress(ProcessLookupError):
                    os.kill(orphan, signal.SIGKILL)
        if owner is not None:
            with suppress(ChannelClosed):
                owner.send("ended", process=process, status=os.waitstatus_to_exitcode(status))


def _leave_finalizers() -> None:
    """Leave the finalizers of the template's objects to the template.

    In a trainer that ends, they would remove the temporary folders of other trainers, and take 90
    ms of CPU time to deregister torch's operators (`torch.library`, torch 2.15).
    """
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False


def _find_ended_child() -> int:
    """Return a child process that has ended and is not yet reaped; 0 if there is none."""
    with suppress(ChildProcessError):
        if ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return ended.si_pid
    return 0


def import_packages(path: Path, source: bytes, skipped: Container[str]) -> Iterator[str]:
    """Import the installed packages that a script imports, and yield each name afterwards.

    Packages in `skipped` are left out. Only imports at the top of the script are found. Packages
    that cannot be imported are ignored, since the script reports the error when it runs.
    """
    with suppress(SyntaxError, ValueError):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The script prints its warnings when it runs.
            tree = ast.parse(source)
        for module, names in _find_imports(tree):
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
    has_asked = False
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # The descriptor of this list is already closed.
            # torch or another library has initialised CUDA or ROCm. NVML, which does not prevent a
            # fork, opens only /dev/nvidiactl.
            has_asked |= bool(
                re.fullmatch(r"/dev/(nvidia-uvm|nvidia\d+|kfd)", str(path.readlink()))
            )
    return "it asks the driver of the GPUs" if has_asked or _is_bad_fork() else ""


def _is_bad_fork() -> bool:
    """Return whether torch could not use its accelerator in a fork of this process."""
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
    """Return whether a module is installed, and is not one of the user's files in `folder`."""
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
    trainer_group.register_gloo()
    keep_freed_memory()


def import_compiler() -> None:
    """Import torch's compiler (0.8 s), which optimizers would import on first use."""
    import torch._dynamo  # noqa: F401


def keep_freed_memory() -> None:
    """Let glibc keep freed memory, so that training steps need not request new pages.

    With 8 ranks on 2 cores, this reduces the system time of 16 trainings from 3.5 s to 0.5 s.
    """
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
        libc.mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD; glibc accepts at most 32 MiB.


def main(state: Mapping[str, Any]) -> None:
    """Run a template. `state` comes from the rank, or from the process that restarts itself."""
    if "parent" in state:
        end_with_parent(state["parent"])
    adopt_orphans()
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    gc.disable()  # Imports create many objects that are never freed.
    import_torch()
    template = TemplateServer(socket.socket(fileno=state["listener"]), state.get("skipped"))
    if "search" in state:
        template.resume(state)
    template.serve()
