"""Test processes that are stopped and continued later, as in jobs that a scheduler suspends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpo.store.journal import FileLock
from tests.support.launch import ROOT

WAITING = """
import sys, threading, time
from pathlib import Path
from hpo.process import clock
from hpo.store.journal import FileLock

def look():
    while True:
        clock.now()
        time.sleep(0.1)

threading.Thread(target=look, daemon=True).start()
# The process may be suspended before the thread looks at the clock, and on busy cores it may have
# had to wait.
before = clock.measure_lost()
began = time.monotonic()
print("waits", flush=True)
FileLock(Path(sys.argv[1]), stale_after=3.0).acquire()
print(f"{time.monotonic() - began:.1f} {clock.measure_lost() - before:.1f}", flush=True)
"""


@pytest.mark.slow
def test_file_lock_does_not_count_suspension_as_stale(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    held = FileLock(path)
    held.acquire()
    command = [sys.executable, "-c", WAITING, str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as waiting:
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "waits\n"
        time.sleep(0.5)
        waiting.send_signal(signal.SIGSTOP)
        time.sleep(4.0)
        waiting.send_signal(signal.SIGCONT)
        took, lost = map(float, waiting.stdout.readline().split())
    assert lost > 3.5
    assert took - lost > 2.9, "the lock was acquired only after it was stale"
