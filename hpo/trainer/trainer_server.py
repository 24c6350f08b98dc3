"""A trainer: a process that a template has forked, and that runs objectives for one rank."""

from __future__ import annotations

import _thread
import atexit
import faulthandler
import gc
import io
import logging
import os
import resource
import signal
import socket
import sys
import threading
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from hpo.errors import UsageError
from hpo.process.channel import Channel, ChannelClosed, Message
from hpo.process.linux import (
    adopt_orphans,
    has_children,
    raise_oom_score,
    read_descriptors,
    read_process_attributes,
)
from hpo.process.messages import EvaluationRequest
from hpo.process.user_frames import extract_current_frames, format_frames, format_header
from hpo.text_format import format_error
from hpo.trainer.accelerator import find_devices
from hpo.trainer.final_test import run_test
from hpo.trainer.objective_runner import ObjectiveRunner
from hpo.trainer.probe import Probe
from hpo.trainer.program_runner import EarlierFiles, ProgramProbe, ProgramRunner
from hpo.trainer.search_file import BoundSearch, SearchSource, answer_constraint_request
from hpo.trainer.shared_data import SharedData, pack_data
from hpo.trainer.signals import IGNORED_SIGNALS, InterruptHandler, register_trainer_process
from hpo.trainer.trainer_group import CONNECT_TIMEOUT, TrainerGroup

_EXIT_SECONDS = 5
_HARMLESS_THREADS = ("TMonitor",)  # tqdm's thread that watches progress bars.


class TrainerServer:
    """Answers the requests of one rank, such as to run the objective, `prepare` or `test`."""

    def __init__(
        self, channel: Channel, search: BoundSearch | None, data: int, stacks: int
    ) -> None:
        self._channel = channel
        self._search = search
        self._data = SharedData(data)
        self._stacks = stacks
        self._group = TrainerGroup()
        self._interrupts = InterruptHandler(self._acknowledge_interrupt)
        self._stores: list[object] = []
        self._attributes = read_process_attributes()
        self._descriptors = read_descriptors()

    @property
    def search(self) -> BoundSearch:
        """The search file with its settings."""
        assert self._search is not None
        return self._search

    def serve(self) -> None:
        """Answer requests until the rank closes the connection."""
        while True:
            message = self._channel.receive()
            assert message is not None
            getattr(self, f"_on_{message.kind}")(message)

    def _acknowledge_interrupt(self) -> None:
        """Send the supervisor the place at which the objective was interrupted."""
        frames = [(frame.filename, frame.lineno, frame.name) for frame in extract_current_frames()]
        self._channel.send("interrupted", frames=frames)

    def _on_evaluate(self, message: Message) -> None:
        threads = set(threading.enumerate())
        request = EvaluationRequest.decode(message.content)
        evaluation = ObjectiveRunner(
            self._channel, self._group, self._interrupts, self.search, request
        )
        with Probe() if request.is_traced else nullcontext() as probe:
            is_restored = evaluation.run(self._data.load, probe)
        if probe is not None:
            self._channel.send("seen", **vars(probe.trace))
        del evaluation  # It may hold the tensors of the objective.
        remains = self._group.memory.find_remains()
        is_clean = is_restored and remains is None and self._is_clean(threads)
        self._channel.send("idle", is_clean=is_clean, remains=remains or "")

    def _on_run(self, message: Message) -> None:
        """Run a program. This process ends when the program ends."""
        file = self.search.file
        source = file.program_source if file.program is not None else None
        files = EarlierFiles(message["since"])
        program = ProgramRunner(self._channel, self._interrupts, message["command"], files, source)
        program.run(message["environment"], ProgramProbe() if message["is_traced"] else None)

    def _is_clean(self, before: set[threading.Thread]) -> bool:
        """Return whether an evaluation has left no threads, processes or pending messages behind.

        It must also have left the attributes of the process, the descriptors that the trainer began
        with, and the process group unchanged. `before` has the threads that existed before the
        evaluation.
        """
        if "torch.distributed.fsdp" in sys.modules:
            # FSDP's hooks and modules form cycles, so networks of many evaluations would pile up.
            gc.collect()
        threads = [thread for thread in threading.enumerate() if thread not in before]
        if any(type(thread).__name__ not in _HARMLESS_THREADS for thread in threads):
            return False
        if sys.stdout.closed or sys.stderr.closed:
            return False
        _enable_crash_stacks(self._stacks)  # Lightning resets the signals of crashes.
        if read_process_attributes() != self._attributes:
            return False
        if not self._descriptors.items() <= read_descriptors().items():
            return False
        return self._group.is_clean and not has_children()

    def _on_prepare(self, _: Message) -> None:
        """Send the result of the user's `prepare` as the descriptor of a file without a name."""
        descriptors = []
        mistake = ""
        try:
            data = self.search.call_prepare()
            descriptors.append(pack_data(data))
        except UsageError as error:
            mistake = ValueError.__str__(error)
        except OSError as error:
            mistake = (
                f"the data of prepare cannot be written: {error.strerror}. "
                "Set TMPDIR=FOLDER to use another folder"
            )
        except Exception as error:
            mistake = (
                "prepare must return data that can be copied for each evaluation, "
                f"got {type(error).__name__}: {error}. "
                "Return arrays, tensors and plain values, and open files in the objective"
            )
        self._channel.send("prepared", descriptors, mistake=mistake)

    def _on_constraints(self, message: Message) -> None:
        self._channel.send(
            "constraints", **answer_constraint_request(self.search.file.space, message.content)
        )

    def _on_test(self, message: Message) -> None:
        for part in run_test(self.search, message["params"], Path(message["weights"])):
            self._channel.send("tested", **part)
        self._channel.send("tested", kind="end")

    def _on_devices(self, _: Message) -> None:
        self._channel.send("devices", **find_devices())

    def _on_store(self, message: Message) -> None:
        """Serve torch's store on a socket that listens already, as the agent of torchrun does."""
        (listener,) = message.descriptors
        options: dict[str, Any] = {"is_master": True, "wait_for_workers": False}
        options.update(host_name=message["address"], port=message["port"])
        options["master_listen_fd"] = listener
        try:
            try:
                store = dist.TCPStore(**options, timeout=CONNECT_TIMEOUT)  # type: ignore[attr-defined]
            except RuntimeError:
                store = dist.TCPStore(**options, use_libuv=False)  # type: ignore[attr-defined]
            self._stores.append(store)
        except RuntimeError as error:
            print(
                f"torch's store cannot be served: {format_error(error)}",
                file=sys.stderr,
                flush=True,
            )


def serve_trainer(request: Message, search: SearchSource | None, data: int) -> None:
    """Set up this forked process as a trainer, and serve the rank that has requested it.

    Raises ChannelClosed when the rank closes the connection.

    Args:
        request: The request of the rank, with file descriptors and the environment of the trainer.
        search: The search file. It is imported now if the template has not imported it.
        data: The file descriptor of the data that `prepare` has returned; -1 without data.
    """
    number, out, err, stacks, stack_requests, *terminal = request.descriptors
    channel = Channel(socket.socket(fileno=number))
    raise_oom_score()
    adopt_orphans()  # Processes that an objective has left behind become children of this process.
    if request["is_attended"]:
        os.dup2(terminal[0], 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        register_trainer_process(())
    else:
        os.setsid()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        register_trainer_process(IGNORED_SIGNALS)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, request["cores"])
    # A core file of a process with a GPU has tens of gigabytes. An objective may raise the limit
    # again.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    _redirect_streams(out, err)
    os.write(stacks, format_header(threading.get_ident()).encode())
    _enable_crash_stacks(stacks)
    _thread.start_new_thread(_write_stacks, (threading.get_ident(), stack_requests, stacks))
    _start_logging(request["log_level"])
    _set_threads(request["threads"])
    dist.set_debug_level_from_env()  # type: ignore[attr-defined]
    gc.enable()
    bound = None if search is None else search.load()
    channel.send("started", process=os.getpid())
    try:
        TrainerServer(channel, bound, data, stacks).serve()
    except ChannelClosed:
        # The functions of atexit are called. A signal ends this process if they take too long.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
        signal.alarm(_EXIT_SECONDS)
        atexit._run_exitfuncs()
        raise


def _enable_crash_stacks(stacks: int) -> None:
    """Write the stacks of all threads to the file `stacks` if this process crashes."""
    faulthandler.disable()  # Otherwise `enable` would not set the handlers again.
    faulthandler.enable(stacks)


def _write_stacks(thread: int, requests: int, stacks: int) -> None:
    """Write the stack of a thread to the file `stacks` at each byte from the pipe `requests`.

    It is not a signal handler, since user code changes those: Lightning resets all signals whose
    handlers were not set in Python. It is not of threading, whose list of threads is the user's.
    """
    with suppress(OSError):  # The objective has closed the descriptors.
        while os.read(requests, 1):
            text = format_frames(sys._current_frames()[thread])
            os.write(stacks, text.encode("ascii", "backslashreplace"))


def _redirect_streams(out: int, err: int) -> None:
    """Redirect the output of this process and of its children to `out` and `err`."""
    os.dup2(out, 1)
    os.dup2(err, 2)
    for number in {out, err} - {1, 2}:
        os.close(number)
    for name, target in (("stdout", 1), ("stderr", 2)):
        binary = open(target, "wb", buffering=0, closefd=False)  # noqa: SIM115 - It stays open.
        stream = io.TextIOWrapper(
            io.BufferedWriter(binary),
            "utf-8",
            errors="backslashreplace",
            line_buffering=True,
            write_through=True,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _start_logging(level: str) -> None:
    """Print log messages to standard error, until a search file configures logging itself.

    It sets `logging.lastResort`, since `basicConfig` has no effect on a root logger that has a
    handler.
    """
    if not logging.getLogger().handlers:
        logging.getLogger().setLevel(level)
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(level)  # Some libraries set the levels of their loggers.
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.lastResort = handler


def _set_threads(threads: int) -> None:
    """Let torch and BLAS use this rank's share of the cores, or the number in OMP_NUM_THREADS.

    OMP_NUM_THREADS is set if it is missing, since frameworks and child processes read it. Without
    it, Lightning and Accelerate use all cores.
    """
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if wanted.isdigit() and int(wanted):
        threads = int(wanted)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    torch.set_num_threads(threads)
    if threads > 1:
        from threadpoolctl import threadpool_limits

        threadpool_limits(threads, user_api="blas")
