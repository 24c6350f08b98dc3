"""The template: a process that imports torch and the search file once, and from which trainers are forked.

The template is started as a new program before its rank initialises MPI. It computes nothing, since
a process in which OpenMP, autograd or CUDA has run is not safe to fork. Several ranks of a host may
use one template. Each rank has its own connection.
"""

from __future__ import annotations

import base64
import faulthandler
import gc
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hpo.errors import UsageError
from hpo.process.channel import Channel, ChannelClosed, Message
from hpo.process.linux import adopt_orphans, end_with_parent, find_children
from hpo.trainer.forks import IGNORED_SIGNALS
from hpo.trainer.script_packages import find_fork_hazard, import_packages
from hpo.trainer.search_file import SearchFile, SearchSource, load_search_file

_IDLE_SECONDS = 0.01
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True)
class _Child:
    process: int
    owner: Channel


class TemplateServer:
    """Forks trainers for the ranks that connect to the socket `listener`, and answers their requests.

    The import of the search file may make this process unsafe to fork, for example if it starts a thread. This process
    then replaces itself by a new process, which gets the file as `cold`, and each trainer imports the file. If a script
    imports a package with this effect, each trainer imports that package; `skipped` maps such packages to the reasons.
    """

    def __init__(
        self, listener: socket.socket, cold: SearchSource | None = None, skipped: Mapping[str, str] | None = None
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
        return self._file is not None and not self._has_preloaded and (self._has_forked or not has_prepare)

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
        self._answer_request(self._channels[requester], Message("bind", {"assignments": search.assignments}))

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

        The restarted template imports all packages except this one, and answers the "bind" request of the rank.
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

        If the `kind` is "cold", trainers import the file. If it is "source", the new process imports the file.
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
        from hpo.process.template_start import make_template_command

        sys.stdout.flush()
        os.execv(sys.executable, make_template_command(state))  # noqa: S606 - this program itself

    def _preload_compiler(self) -> None:
        from hpo.trainer.preloading import import_compiler

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

            serve_trainer(message, self._file, self._unimported_search or self._assignments, self._data)
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
                    os.killpg(child.process, signal.SIGKILL)  # The process id is not reused before waitpid.
            _, status = os.waitpid(ended.si_pid, 0)
            for orphan in find_children(os.getpid()):  # The children of killed orphans are found next time.
                if orphan not in self._children and orphan not in self._foreign_children:
                    with suppress(ProcessLookupError):
                        os.kill(orphan, signal.SIGKILL)
            if child is not None:
                with suppress(ChannelClosed):
                    child.owner.send("ended", process=child.process, status=os.waitstatus_to_exitcode(status))


def main(state: Mapping[str, Any]) -> None:
    """Run a template. `state` comes from `hpo.process.template_start`, or from the previous process at a restart."""
    if "parent" in state:
        end_with_parent(state["parent"])
    adopt_orphans()
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    gc.disable()  # Imports create many objects that are never freed.
    from hpo.trainer.preloading import import_torch

    import_torch()
    template = TemplateServer(
        socket.socket(fileno=state["listener"]), SearchSource.read(state.get("cold")), state.get("skipped")
    )
    template._channels = [Channel(socket.socket(fileno=number)) for number in state.get("channels", ())]
    if (search := SearchSource.read(state.get("source"))) is not None:
        template.bind_again(search, state["asker"])
    template.serve()
