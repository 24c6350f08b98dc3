"""Entry point of the process that sends a run to one tracker: python -m hpo.trackers NAME RUN_DIR.

The job writes the studies to follow to the standard input of this process, one JSON object per
line. The end of the input means that no more studies follow. This process writes messages for the
user to its standard output.
"""

from __future__ import annotations

import io
import json
import os
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name

from hpo.errors import UsageError
from hpo.store.run_dir import RunDir
from hpo.text_format import cut_text, format_error, make_printable
from hpo.trackers.tracker import TrackedRun, Tracker, remove_secrets
from hpo.trackers.tracker_updater import ShownEvaluations, TrackerUpdater

_POLL_SECONDS = 2.0
_LONGEST_POLL_SECONDS = 10.0
_MAX_CPU_SHARE = 0.02  # of one core, used for polling; slower polls send more changes at once
_EXIT_SECONDS_AFTER_JOB = 3.0
_LONGEST_REASON = 300
# The import of a tracker's package takes seconds.
_CLASSES = {
    "tensorboard": "hpo.trackers.tensorboard:TensorBoard",
    "mlflow": "hpo.trackers.mlflow:MLflow",
    "wandb": "hpo.trackers.wandb:WandB",
}


def main() -> None:
    """Send a run to a tracker until the run ends. Print an error as one line, with status 1."""
    name = sys.argv[1]
    run_dir = Path(sys.argv[2])
    voice = os.fdopen(os.dup(1), "w", encoding="utf-8")
    with open(os.devnull, "w") as nowhere:  # Packages print a lot. # noqa: PTH123
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    # Packages print symbols that some locales cannot encode.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")

    def notify(text: str, kind: str = "") -> None:
        message = make_printable(remove_secrets(text))
        print(f"{kind}--tracker {name}: {message}", file=voice, flush=True)

    # Schedulers send them to all processes.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    job = os.getppid()
    threading.Thread(target=_exit_after_job, args=(job,), daemon=True).start()
    status = 0
    try:
        _follow_run(name, run_dir, job, notify)
    except BaseException as error:
        # Secrets are removed before the cut, because a pattern does not match a secret that was cut
        # off.
        reason = cut_text(remove_secrets(format_error(error)), _LONGEST_REASON)
        message = reason if isinstance(error, UsageError) else f"{type(error).__name__}: {reason}"
        notify(f"{message}; this tracker gets no more updates", kind="warning: ")
        status = 1
    # All data are written. A normal exit of packages takes a second, and may block after an error.
    os._exit(status)


def _follow_run(name: str, run_dir: Path, job: int, notify: Callable[[str], None]) -> None:
    run = RunDir(run_dir).read_manifest()
    with (
        ShownEvaluations(run_dir / name / "written.jsonl") as written,
        open(0, "rb", buffering=0) as orders,
    ):
        make_tracker: Callable[[TrackedRun], Tracker] = resolve_name(_CLASSES[name])
        tracker = make_tracker(TrackedRun(written.id, run, run_dir / name, notify))
        follower = TrackerUpdater(tracker, written)
        over = False
        pause = _POLL_SECONDS
        while not over:
            order = orders.readline() if select.select([orders], [], [], pause)[0] else None
            if order:
                follower.add_study(**json.loads(order))
                continue
            over = order == b"" or os.getppid() != job
            before = time.process_time()
            follower.show_changes(running=not over)
            taken = time.process_time() - before
            pause = min(max(_POLL_SECONDS, taken / _MAX_CPU_SHARE), _LONGEST_POLL_SECONDS)
        tracker.close(follower.is_over(run.study, run.budget, run.pruner))


def _exit_after_job(job: int) -> None:
    """End this process soon after the process `job`, even if a package blocks the main thread."""
    while os.getppid() == job:
        time.sleep(_POLL_SECONDS)
    time.sleep(_EXIT_SECONDS_AFTER_JOB)
    os._exit(1)


if __name__ == "__main__":
    main()
