"""A rank's connection to the template of its host, from which its trainers are forked."""

from __future__ import annotations

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
from hpo.process.launcher import is_first_on_host
from hpo.process.linux import identify_container
from hpo.process.template_start import make_template_command, make_template_environment

_POLL_SECONDS = 0.1
_SECONDS_BETWEEN_CRASHES = 60.0
_SECONDS_FOR_A_STATUS = 10.0  # the template may import torch's compiler just then, on busy cores
_SECONDS_TO_END = 3.0
_MAX_SHOWN_CHARACTERS = 4000  # characters of what a template has printed


class _OutputFile:
    """What a process prints, in a file without a name, which never makes it wait."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("hpo-template")
        self._offset = 0

    def read_new(self) -> str:
        """Return what was printed since the last call."""
        data = os.pread(self.descriptor, os.fstat(self.descriptor).st_size - self._offset, self._offset)
        self._offset += len(data)
        return data.decode(errors="replace")


def _write_text(text: str, stream: TextIO) -> None:
    with suppress(OSError, ValueError):
        print(text, end="", file=stream, flush=True)


class TemplateProcess:
    """A template that this rank has started; `address` is where ranks of the host connect to it."""

    def __init__(self) -> None:
        self.address = f"\0hpo-{uuid.uuid4().hex}"  # of Linux's abstract sockets, which leave no file
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen(1024)
            self._output_files = _OutputFile(), _OutputFile()
            state = {"listener": listener.fileno(), "parent": os.getpid()}
            try:
                self._process = subprocess.Popen(
                    make_template_command(state),
                    env=make_template_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=self._output_files[0].descriptor,
                    stderr=self._output_files[1].descriptor,
                    pass_fds=[listener.fileno()],
                    start_new_session=True,
                )
            except OSError as error:
                raise RunError(f"{sys.executable} cannot be started: {error.strerror}") from error

    def forward_output(self) -> None:
        """Print what the template has printed since the last call."""
        _write_text(self._output_files[0].read_new(), sys.stdout)
        _write_text(self._output_files[1].read_new(), sys.stderr)

    def describe_exit(self) -> str:
        """Print the rest of standard output; return how the template has ended, and the last of standard error."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_SECONDS_TO_END)
        _write_text(self._output_files[0].read_new(), sys.stdout)
        text = self._output_files[1].read_new()[-_MAX_SHOWN_CHARACTERS:].strip()
        return f"{describe_status(self._process.returncode)}{f':{chr(10)}{text}' if text else ''}"

    def kill(self) -> None:
        """Kill the template, with its trainers."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_SECONDS_TO_END)


def start_template() -> TemplateProcess | None:
    """Start a template if this rank is its host's first, as far as the launcher says; call it before MPI begins."""
    return TemplateProcess() if is_first_on_host(os.environ) else None


class TemplateClient:
    """The template that this rank uses; `process` is it if this rank has started it.

    A template that dies is replaced by one of this rank's own, which loads what it has loaded; raises RunError where
    that dies soon after.
    """

    def __init__(self, address: str, process: TemplateProcess | None) -> None:
        self._process = process
        self._channel = _connect_channel(address)
        self._load_requests: list[tuple[str, Mapping[str, Any]]] = []
        self.unsafe_reason = ""  # why trainers have to import the search file themselves
        self.skipped_packages: dict[
            str, str
        ] = {}  # the packages of a script that they have to import themselves, and why
        self.gpus = 0
        self._data_descriptor = -1
        self._exit_statuses: dict[int, int] = {}
        self._crashed_at: float | None = None
        self.crash_count = 0
        self.is_open = True

    is_open: bool
    """Whether the template is alive, as far as is known."""

    def fileno(self) -> int:
        """Return the descriptor to wait for news of trainers."""
        return self._channel.fileno()

    def ask(self, kind: str, **content: Any) -> dict[str, Any]:
        """Return the answer to a request about the search file. Raises UsageError if there is a mistake in it."""
        answer = self._ask_template(kind, **content).content
        if kind == "bind":
            self.unsafe_reason, self.skipped_packages, self.gpus = answer["unsafe"], answer["skipped"], answer["gpus"]
        return dict(answer)

    def remember_requests(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Remember what has let the template load the search file, for another one that may have to be started."""
        self._load_requests = list(requests)

    def keep_data(self, descriptor: int) -> None:
        """Let trainers have what `prepare` has returned; the descriptor stays open here."""
        self._data_descriptor = descriptor
        self._send_request("keep_data", [descriptor])
        self._receive_answer()

    def fetch_data(self) -> None:
        """Learn the data of another rank of this host, for a template that may have to be started later."""
        self._send_request("fetch_data")
        (self._data_descriptor,) = self._receive_answer("data").descriptors or (-1,)

    def spawn(self, descriptors: Sequence[int], **content: Any) -> tuple[int, Channel]:
        """Fork a trainer, and return its process number and this rank's end of the connection to it."""
        while True:
            channel, other = make_channel_pair()
            with other:
                try:
                    self._send_request("spawn", [other.fileno(), *descriptors], **content)
                    return int(self._receive_answer("spawned")["process"]), channel
                except ChannelClosed:
                    channel.close()
                    self._replace_process()

    def read_messages(self) -> None:
        """Take in what the template has said of its trainers."""
        try:
            while (message := self._channel.receive(0)) is not None:
                self._handle_message(message)
        except ChannelClosed:
            self.is_open = False

    def has_ended(self, process: int) -> bool:
        """Tell whether a trainer is known to have ended."""
        return process in self._exit_statuses

    def wait_for_status(self, process: int) -> int | None:
        """Return a trainer's exit status, negative for a signal; None if the template does not say it soon."""
        give_up_at = time.monotonic() + _SECONDS_FOR_A_STATUS
        while process not in self._exit_statuses and time.monotonic() < give_up_at:
            try:
                message = self._channel.receive(_POLL_SECONDS)
            except ChannelClosed:
                self.is_open = False
                break
            if message is not None:
                self._handle_message(message)
        return self._exit_statuses.get(process)

    def close(self) -> None:
        """End the connection, and with it this rank's trainers; end the template if this rank has started it."""
        self._channel.close()
        if self._process is not None:
            self._process.kill()

    def _replace_process(self) -> None:
        """Start a template of this rank's own in the place of one that has died, and load what that had loaded."""
        now = time.monotonic()
        died = self._process.describe_exit() if self._process else "has gone"
        if self._crashed_at is not None and now - self._crashed_at < _SECONDS_BETWEEN_CRASHES:
            raise RunError(f"the template, from which trainers are forked, {died}; it is the second time in a minute")
        self._crashed_at = now
        self.crash_count += 1
        self._channel.close()
        self._process = TemplateProcess()
        self._channel = _connect_channel(self._process.address)
        self.is_open = True
        try:
            for kind, content in self._load_requests:
                self._ask_template(kind, **content)
            if self._data_descriptor >= 0:
                self._send_request("keep_data", [self._data_descriptor])
                self._receive_answer()
        except (UsageError, ChannelClosed) as error:
            raise RunError(
                f"the template, from which trainers are forked, {died}; another one fails: {error}"
            ) from error

    def _ask_template(self, kind: str, **content: Any) -> Message:
        try:
            self._send_request(kind, **content)
            return self._receive_answer()
        except ChannelClosed:
            died = self._process.describe_exit() if self._process else "has gone"
            what = content.get("path", "the search file")
            raise UsageError(f"{what}: the process that imports it {died}") from None

    def _send_request(self, kind: str, descriptors: Sequence[int] = (), **content: Any) -> None:
        self._channel.send(kind, descriptors, **content)

    def _receive_answer(self, kind: str = "answer") -> Message:
        """Wait for an answer; what the template prints in the meantime is printed."""
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
            self._handle_message(message)

    def _handle_message(self, message: Message) -> None:
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
    """Return the template that this rank uses, and whether it is the first rank that uses it; collective over a host.

    Ranks that share the host, its namespaces and their cgroup use the template of the first of them that has one.
    """
    here = identify_container()
    told: list[tuple[str, str]] = host.allgather((here, own.address if own else ""))
    ranks = [rank for rank, (where, _) in enumerate(told) if where == here]
    starters = [rank for rank in ranks if told[rank][1]]
    if not starters and host.rank == ranks[0]:
        own = TemplateProcess()  # the launcher has named another rank the host's first
    addresses = host.allgather(own.address if own else "")
    chosen = starters[0] if starters else ranks[0]
    if own is not None and chosen != host.rank:
        own.kill()
        own = None
    template = TemplateClient(addresses[chosen], own)
    return template, host.rank == ranks[0]
