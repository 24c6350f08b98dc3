"""A rank's connection to the template of its host."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TextIO

from hpo.errors import RunError, UsageError
from hpo.process.channel import Channel, ChannelClosed, Message, make_channel_pair
from hpo.process.failure import describe_status
from hpo.process.launcher import is_first_on_host, make_template_command, make_template_environment
from hpo.process.linux import identify_container

_POLL_SECONDS = 0.1
_SECONDS_BETWEEN_CRASHES = 60.0
_SECONDS_FOR_A_STATUS = 10.0  # The template may be importing torch's compiler, on busy cores.
_SECONDS_TO_END = 3.0
_MAX_SHOWN_CHARACTERS = 4000  # length of the shown end of a template's output


class _OutputFile:
    """A file in memory for the output of a process. Unlike a pipe, it never blocks the process."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("hpo-template")
        self._offset = 0

    def read_new(self) -> str:
        """Return the output since the previous call."""
        size = os.fstat(self.descriptor).st_size
        data = os.pread(self.descriptor, size - self._offset, self._offset)
        self._offset += len(data)
        return data.decode(errors="replace")


def _write_text(text: str, stream: TextIO) -> None:
    with suppress(OSError, ValueError):
        print(text, end="", file=stream, flush=True)


class TemplateProcess:
    """A template that this rank has started.

    Attributes:
        address: Address of the socket to which the ranks of the host connect.

    Raises:
        RunError: The process cannot be started.
    """

    def __init__(self) -> None:
        # An abstract socket of Linux, which leaves no file.
        self.address = f"\0hpo-{uuid.uuid4().hex}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen(1024)
            self._output = _OutputFile()
            self._errors = _OutputFile()
            state = {"listener": listener.fileno(), "parent": os.getpid()}
            try:
                self._process = subprocess.Popen(
                    make_template_command(state),
                    env=make_template_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=self._output.descriptor,
                    stderr=self._errors.descriptor,
                    pass_fds=[listener.fileno()],
                    start_new_session=True,
                )
            except OSError as error:
                raise RunError(f"{sys.executable} cannot be started: {error.strerror}") from error

    def forward_output(self) -> None:
        """Print the template's output since the previous call."""
        _write_text(self._output.read_new(), sys.stdout)
        _write_text(self._errors.read_new(), sys.stderr)

    def describe_exit(self) -> str:
        """Return how the template has ended, with its last errors; print the rest of its output."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_SECONDS_TO_END)
        _write_text(self._output.read_new(), sys.stdout)
        lines = self._errors.read_new().splitlines()
        # After a crash, faulthandler lists all extension modules. The list may be longer than the
        # shown text.
        shown = "\n".join(line for line in lines if not line.startswith("Extension modules: "))
        text = shown[-_MAX_SHOWN_CHARACTERS:].strip()
        return f"{describe_status(self._process.returncode)}{f':{chr(10)}{text}' if text else ''}"

    def kill(self) -> None:
        """Kill the template. Its trainers end with it."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_SECONDS_TO_END)


def start_template() -> TemplateProcess | None:
    """Start a template if this rank is the first on its host; call it before MPI starts."""
    return TemplateProcess() if is_first_on_host(os.environ) else None


class TemplateClient:
    """Connection to the template that this rank uses.

    If the template crashes, this rank starts a new one for itself alone, which loads the same
    search file.

    Args:
        process: The template if this rank has started it, otherwise None.

    Attributes:
        load_requests: Requests with which the template has loaded its file, for a replacement.
        crash_count: Number of crashes of the template.
        is_open: Whether the template is running, as far as this rank knows.

    Raises:
        RunError: The template cannot be reached, or its replacement crashes within a minute of use.
    """

    def __init__(self, address: str, process: TemplateProcess | None) -> None:
        self._process = process
        self._channel = _connect_channel(address)
        self.load_requests: Sequence[tuple[str, Mapping[str, Any]]] = ()
        self._data_descriptor = -1
        self._exit_statuses: dict[int, int] = {}
        self._replaced_at = -math.inf
        self.crash_count = 0
        self.is_open = True

    def fileno(self) -> int:
        """Return the file descriptor to wait on for messages."""
        return self._channel.fileno()

    def ask(self, kind: str, **content: Any) -> dict[str, Any]:
        """Send a request about the search file to the template, and return the answer.

        Raises:
            UsageError: The search file has a mistake.
        """
        try:
            self._channel.send(kind, **content)
            return dict(self._receive_answer().content)
        except ChannelClosed:
            path = content.get("path", "the search file")
            raise UsageError(
                f"{path}: the process that imports it {self._describe_exit()}"
            ) from None

    def keep_data(self, descriptor: int) -> None:
        """Give trainers the data of `prepare`, in a file that stays open for a new template."""
        self._data_descriptor = descriptor
        self._channel.send("keep_data", [descriptor])
        self._receive_answer()

    def fetch_data(self) -> None:
        """Get the data that another rank has sent to the template, for a new template."""
        self._channel.send("fetch_data")
        (self._data_descriptor,) = self._receive_answer("data").descriptors or (-1,)

    def spawn(self, descriptors: Sequence[int], **content: Any) -> tuple[int, Channel]:
        """Let the template fork a trainer; return its process number, and a channel to it."""
        while True:
            channel, trainer_end = make_channel_pair()
            with trainer_end:
                try:
                    self._channel.send("spawn", [trainer_end.fileno(), *descriptors], **content)
                    return int(self._receive_answer("spawned")["process"]), channel
                except ChannelClosed:
                    channel.close()
                    self._replace_process()

    def read_messages(self) -> None:
        """Read pending messages about trainers that have ended."""
        try:
            while (message := self._channel.receive(0)) is not None:
                self._record_exit(message)
        except ChannelClosed:
            self.is_open = False

    def has_ended(self, process: int) -> bool:
        """Return whether a trainer is known to have ended."""
        return process in self._exit_statuses

    def wait_for_status(self, process: int) -> int | None:
        """Return a trainer's exit status, negative for a signal; None if it is not known soon."""
        give_up_at = time.monotonic() + _SECONDS_FOR_A_STATUS
        while process not in self._exit_statuses and time.monotonic() < give_up_at:
            try:
                message = self._channel.receive(_POLL_SECONDS)
            except ChannelClosed:
                self.is_open = False
                break
            if message is not None:
                self._record_exit(message)
        return self._exit_statuses.get(process)

    def close(self) -> None:
        """Close the connection, which ends this rank's trainers; kill a template of its own."""
        self._channel.close()
        if self._process is not None:
            self._process.kill()

    def _replace_process(self) -> None:
        """Replace a template that has crashed, and let the new one load the same file and data."""
        failure = f"the template, from which trainers are forked, {self._describe_exit()}"
        if time.monotonic() - self._replaced_at < _SECONDS_BETWEEN_CRASHES:
            raise RunError(f"{failure}; it had run for less than a minute, after another crash")
        self.crash_count += 1
        self._channel.close()
        self._process = TemplateProcess()
        self._channel = _connect_channel(self._process.address)
        self.is_open = True
        try:
            for kind, content in self.load_requests:
                self.ask(kind, **content)
            if self._data_descriptor >= 0:
                self._channel.send("keep_data", [self._data_descriptor])
                self._receive_answer()
        except (UsageError, ChannelClosed) as error:
            raise RunError(f"{failure}; its replacement fails: {error}") from error
        self._replaced_at = time.monotonic()  # Now: on a slow disk, torch alone takes a minute.

    def _describe_exit(self) -> str:
        return self._process.describe_exit() if self._process else "has ended"

    def _receive_answer(self, kind: str = "answer") -> Message:
        """Wait for an answer, and print the template's output in the meantime."""
        while True:
            message = self._channel.receive(_POLL_SECONDS)
            if self._process is not None:
                self._process.forward_output()
            if message is None:
                continue
            if message.kind == "mistake":
                raise UsageError(message["text"])
            if message.kind == kind:
                return message
            self._record_exit(message)

    def _record_exit(self, message: Message) -> None:
        if message.kind == "ended":
            self._exit_statuses[message["process"]] = message["status"]


def _connect_channel(address: str) -> Channel:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(address)
    except OSError as error:
        raise RunError(f"the template of this host cannot be reached: {error.strerror}") from error
    return Channel(connection)


def share_template(own: TemplateProcess | None, host: Any) -> tuple[TemplateClient, bool]:
    """Connect to a template of this host. Collective: call on all ranks of the host.

    Ranks in the same container (same namespaces and same cgroup) share a template. If several of
    them have started one, they use the template of the lowest rank, and kill the others. If none of
    them has, the lowest rank starts one.

    Returns:
        The connection, and whether this rank is the first that uses this template.
    """
    container = identify_container()
    infos: list[tuple[str, str]] = host.allgather((container, own.address if own else ""))
    ranks = [rank for rank, (rank_container, _) in enumerate(infos) if rank_container == container]
    starters = [rank for rank in ranks if infos[rank][1]]
    if not starters and host.rank == ranks[0]:
        own = TemplateProcess()  # The launcher's first rank on this host is in another container.
    addresses = host.allgather(own.address if own else "")
    chosen = starters[0] if starters else ranks[0]
    if own is not None and chosen != host.rank:
        own.kill()
        own = None
    return TemplateClient(addresses[chosen], own), host.rank == ranks[0]
