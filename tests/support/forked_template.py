"""Let a rank have its template forked by the template server of the tests.

A template of its own would import torch and torch's compiler, which takes most of the CPU time of a
short job.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hpo.evaluation import template_client

_SECONDS_TO_FORK = 300.0  # of a busy server, at most


class ForkedTemplate:
    """A template that serve_templates.py forks, with what ranks use of subprocess.Popen."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        stdout: int,
        stderr: int,
        pass_fds: Sequence[int],
        *,
        server: str,
        **_: Any,
    ) -> None:
        self.returncode: int | None = None
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(f"\0{server}")
        os.umask(mask := os.umask(0))
        request = {
            "environment": env,
            "folder": str(Path.cwd()),
            "path": json.loads(command[-1]),
            "umask": mask,
        }
        content = json.dumps(request).encode() + b"\n"
        sent = socket.send_fds(self._connection, [content], [*pass_fds, stdout, stderr])
        self._connection.sendall(content[sent:])
        self._connection.settimeout(_SECONDS_TO_FORK)
        assert self._read_line() == "forked\n"

    def kill(self) -> None:
        """Kill the template."""
        if self.returncode is None:
            self._connection.shutdown(socket.SHUT_WR)

    def wait(self, seconds: float) -> int:
        """Wait for the end of the template, and return its exit status.

        Raise TimeoutExpired after `seconds`.
        """
        if self.returncode is None:
            self._connection.settimeout(seconds)
            try:
                # It ends with its server.
                self.returncode = int(self._read_line() or -signal.SIGKILL)
            except TimeoutError:
                raise subprocess.TimeoutExpired("template", seconds) from None
            self._connection.close()
        return self.returncode

    def _read_line(self) -> str:
        """Return the next line from the server; empty if the server has ended."""
        line = b""
        while not line.endswith(b"\n") and (byte := self._connection.recv(1)):
            line += byte
        return line.decode()


def fork_templates(server: str) -> None:
    """Let this rank have its templates forked by the template server with this socket."""
    vars(template_client)["subprocess"] = types.SimpleNamespace(
        Popen=partial(ForkedTemplate, server=server),
        DEVNULL=subprocess.DEVNULL,
        TimeoutExpired=subprocess.TimeoutExpired,
    )


def run_python(arguments: Sequence[str]) -> None:
    """Run a program in this process as `python ARGUMENTS` does."""
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        exec(arguments[1], {"__name__": "__main__"})
    else:
        sys.argv = list(arguments)
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")
