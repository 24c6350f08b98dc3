"""Fork templates from a process with torch: serve_templates.py SOCKET PID.

A rank sends a template's environment, folder, umask and paths, with the descriptors of its
listening socket and its output. It gets "forked", and later the exit status. If the rank closes its
connection, the template is killed. This process ends with the process number PID. A forked process
shows the environment variables of this process in /proc, so a template gets the mark of its job
(see `tests.support.chaos`) as its name too, and so do its trainers.
"""

import gc
import json
import os
import select
import signal
import socket
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path

from hpo.process.linux import end_with_parent
from hpo.trainer.template_server import import_compiler, import_torch, main

MAX_REQUEST_BYTES = 1 << 20


def become_template(request, listener, out, err):
    os.setsid()
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    os.umask(request["umask"])
    sys.path[:] = request["path"]
    if mark := os.environ.get("HPO_TEST_JOB"):
        Path("/proc/self/comm").write_text(mark)
    tempfile.tempdir = None  # It depends on the variables.
    main({"listener": listener, "parent": os.getppid()})


class TemplateForker:
    def __init__(self, listener):
        self.listener = listener
        self.connections = {}  # to ranks, by the process of their template

    def serve(self):
        wakeup, wakeup_writer = os.pipe()
        os.set_blocking(wakeup_writer, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup_writer, warn_on_full_buffer=False)
        while True:
            ready = select.select([self.listener, wakeup, *self.connections.values()], [], [])[0]
            for process, connection in self.connections.items():
                if connection in ready:
                    os.kill(process, signal.SIGKILL)
            if wakeup in ready:
                os.read(wakeup, 4096)
                self.reap()
            if self.listener in ready:
                self.fork()

    def fork(self):
        connection, _ = self.listener.accept()
        data, descriptors, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 3)
        while not data.endswith(b"\n"):
            if not (more := connection.recv(MAX_REQUEST_BYTES)):
                connection.close()  # The rank has ended.
                return
            data += more
        process = os.fork()
        if process == 0:
            try:
                signal.set_wakeup_fd(-1)
                for other in (self.listener, connection, *self.connections.values()):
                    other.close()
                become_template(json.loads(data), *descriptors)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        for descriptor in descriptors:
            os.close(descriptor)
        self.connections[process] = connection
        with suppress(OSError):
            connection.sendall(b"forked\n")

    def reap(self):
        while self.connections:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                return
            with self.connections.pop(process) as connection, suppress(OSError):
                connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def import_packages():
    """Import torch, and the packages of most search files of the tests."""
    import_torch()
    import_compiler()
    # sklearn imports pandas, and pandas pyarrow, which starts a thread: a process with several
    # threads must not be forked.
    sys.modules["pandas"] = None  # type: ignore[assignment]
    import sklearn.datasets  # noqa: F401

    del sys.modules["pandas"]
    import torchvision.datasets
    import torchvision.models  # noqa: F401


if __name__ == "__main__":
    end_with_parent(int(sys.argv[2]))
    gc.disable()
    import_packages()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{sys.argv[1]}")
        server.listen()
        print("ready", flush=True)
        TemplateForker(server).serve()
