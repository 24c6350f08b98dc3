"""Test how training scripts start, report and exit."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from tests.support.launch import SCRIPTS, SEARCH, Mpi
from tests.support.run_output import load_trials

LOSS = ["--loss", r"val_loss=(\S+)", "--run-dir", "run"]

ABORTS = {
    "mute": r"rank [01]: \./train\.sh ended with status 134; its last line on stderr: .*Aborted.*",
    "shell": "",
    "second": "",
    "exec": "",
    "raise": r"rank [01]: \./train\.sh ended with status 134; "
    r"its last error on stderr: ValueError: injected",
    "bare": r"rank [01]: \./train\.sh ended with status 134; its last line on stderr: .*Aborted.*",
}


EARLY = """
import sys
try:
    early = [name for name in ("pyarrow", "joblib") if name in sys.modules]
finally:
    pass
import pyarrow
import joblib
print(f"val_loss={len(early)} {early}")
"""


def test_package_that_starts_thread_is_left_to_trainers(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(EARLY)
    job = mpi.run(
        2,
        *SEARCH,
        "--space",
        "k=Int(1, 9)",
        *LOSS,
        "--evaluations",
        2,
        "--",
        "train.py",
        cwd=tmp_path,
    )
    assert (job.returncode, job.stderr) == (0, "")
    lines = re.findall("^train.py: .*", job.stdout, re.MULTILINE)
    assert lines == [
        "train.py: when pyarrow is imported, it starts 1 thread: each trainer imports it"
    ]
    assert job.stdout.count("val_loss=1 ['joblib']") == 4


def test_command_aborted_at_exit_is_complete(mpi: Mpi, tmp_path: Path) -> None:
    python = f"{sys.executable} {SCRIPTS / 'aborting.py'}"
    script = tmp_path / "train.sh"
    script.write_text(f'#!/bin/bash\n[ "$2" = exec ] && exec {python} "$@"\n{python} "$@"\n')
    script.chmod(0o755)
    (tmp_path / "given.json").write_text(json.dumps([{"way": way} for way in ABORTS]))
    options = [
        "--space",
        f"way=Categorical({', '.join(map(repr, ABORTS))})",
        "--enqueue",
        "given.json",
        *LOSS,
    ]
    job = mpi.run(
        2, *SEARCH, *options, "--evaluations", len(ABORTS), "--", "./train.sh", cwd=tmp_path
    )
    assert job.returncode == 0, job.stderr
    trials = {trial.params["way"]: trial for trial in load_trials(tmp_path / "run")}
    for way, failure in ABORTS.items():
        if failure:
            assert re.fullmatch(failure, trials[way].user_attrs["failure"]), way
        else:
            assert trials[way].values == [0.5], way
    warnings = re.findall("^warning: .*", job.stderr, re.MULTILINE)
    text = "aborted while it exited, which does not fail an evaluation with a loss"
    assert warnings == [
        f"warning: trial {trials['shell'].number}: ./train.sh ended with status 134: {text}",
        f"warning: trial {trials['exec'].number}: ./train.sh was ended by SIGABRT: {text}",
    ]


def test_report_after_matching_line_warns_once(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import time, hpo\n\nprint('val_loss=0.5')\ntime.sleep(0.5)\nhpo.report(0.25)\n"
    )
    job = mpi.run(
        2,
        *SEARCH,
        "--space",
        "k=Int(1, 9)",
        *LOSS,
        "--evaluations",
        2,
        "--",
        "train.py",
        cwd=tmp_path,
    )
    assert job.returncode == 0
    assert job.stderr == (
        "warning: trial 0: hpo.report is ignored, since a line has matched --loss before. Use "
        "only one of them in all evaluations\n"
    )
    assert [trial.values for trial in load_trials(tmp_path / "run")] == [[0.5], [0.5]]
