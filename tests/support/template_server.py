"""A process with torch, from which the templates of jobs are forked. Jobs share nothing else.

`tests.support.forked_template` is the side of the ranks.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import uuid
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hpo.process.launcher import make_template_environment

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "programs"
# With memory in huge pages, a fork and its end take 20 instead of 30 ms of CPU time.
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


@dataclass(frozen=True)
class TemplateServer:
    """The template server of this test process: its abstract socket, and its process."""

    name: str
    process: int


@cache
def get_template_environment() -> dict[str, str]:
    """Return the variables of a template, before a test has changed those of this process."""
    return make_template_environment()


@cache
def start_template_server() -> TemplateServer:
    """Start the template server of this test process, which ends with this process."""
    name = f"hpo-test-{uuid.uuid4().hex}"
    process = subprocess.Popen(
        [sys.executable, "-u", str(PROGRAMS / "serve_templates.py"), name, str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env={**get_template_environment(), "PYTHONPATH": str(ROOT), **_HUGE_PAGES},
    )
    atexit.register(process.kill)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", "the template server has ended"
    return TemplateServer(name, process.pid)
