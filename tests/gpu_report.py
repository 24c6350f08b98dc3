"""Run searches on this host's GPUs, and print a table (docs/operation/gpu-report.md).

`make test-gpu` runs it: ten minutes on one GPU, forty on several. Each step is independent, and has
a time limit. The status is 1 if a step fails.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.launch import PROGRAM, ROOT, SEARCHES, make_hpo_command
from tests.support.run_output import load_trials

SEARCH = SEARCHES / "gpu_ways.py"
FAILING_WAYS = ("assert", "address", "memory", "kill", "hide")
LIMIT_SECONDS = 240.0
FACTS = """
import torch, torch.distributed as dist
properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
names = sorted({f"{one.name}, {one.total_memory >> 30} GiB" for one in properties})
nccl = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none"
print(
    f"{len(properties)} x {' / '.join(names)}; "
    f"torch {torch.__version__}, NCCL {nccl}, HIP {torch.version.hip}"
)
"""
SCRIPT = """
import argparse, os, torch, torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
lr, rank = parser.parse_args().lr, int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
torch.cuda.set_device(rank)
dist.init_process_group()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1).cuda(), device_ids=[rank])
model(torch.ones(2, 4).cuda()).sum().backward()
if dist.get_rank() == 0:
    print(f"val_loss={lr}")
dist.destroy_process_group()
"""


@dataclass
class Host:
    """Runs jobs on the GPUs of this host; `variables` are added to the environment."""

    folder: Path
    gpus: int
    variables: dict[str, str] = field(default_factory=dict)

    def run(self, ranks: int, *arguments: object, **variables: str) -> str:
        """Run a Python program on a number of ranks, and return its output.

        Raises RuntimeError if it fails.
        """
        command = ["mpirun", "-n", ranks, sys.executable, *arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **self.variables, **variables}
        job = subprocess.run(
            list(map(str, command)),
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_SECONDS,
        )
        if job.returncode:
            raise RuntimeError(f"status {job.returncode}: {(job.stdout + job.stderr)[-800:]}")
        return job.stdout + job.stderr

    def search(
        self, ranks: int, ways: Sequence[str], *options: object, **variables: str
    ) -> list[dict[str, Any]]:
        """Run one evaluation of each way on one worker, and return the notes of its last rank.

        Each note also has the `state` and the `failure` of its trial.
        """
        for path in self.folder.glob("*-*-*.json"):
            path.unlink()
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        (self.folder / "given.json").write_text(json.dumps([{"k": k} for k in range(len(ways))]))
        given = (
            "--enqueue",
            "given.json",
            "--evaluations",
            len(ways),
            "--set",
            f"ways={','.join(ways)}",
        )
        worker = (
            "--run-dir",
            "run",
            "--islands",
            1,
            "--ranks-per-worker",
            ranks,
            "--set",
            f"folder={self.folder}",
        )
        self.run(ranks, PROGRAM, SEARCH, *worker, *given, *options, **variables)
        trials = load_trials(self.folder / "run")
        return [
            {
                **json.loads((self.folder / f"{k}-0-{ranks - 1}.json").read_text()),
                "state": trials[k].state.name,
                "failure": trials[k].user_attrs.get("failure", ""),
                "seconds": trials[k].user_attrs.get("seconds", 0.0),
            }
            for k in range(len(ways))
        ]


def check_memory(notes: Sequence[dict[str, Any]]) -> str:
    """Return the range of the free memory at the start of the evaluations.

    Raises AssertionError if it has shrunk.
    """
    free, total = [note["free"] for note in notes], notes[0]["total"]
    text = f"free at the start of each: {min(free) / 2**30:.1f} to {max(free) / 2**30:.1f} GiB"
    assert min(free) > max(free) - 0.05 * total, f"memory remains in use: {text}"
    return text


def reuse_trainers(host: Host) -> str:
    kept = host.search(1, [""] * 30)
    assert {note["state"] for note in kept} == {"COMPLETE"}
    assert len({note["process"] for note in kept}) == 1, "trainers were replaced"
    maps = Path(f"/proc/{kept[0]['template']}/maps")
    assert not maps.exists(), "the template is still running"
    fresh = host.search(1, [""] * 4, "--fresh-trainers")
    median = sorted(note["seconds"] for note in kept)[15]
    first = sorted(note["seconds"] for note in fresh)[2]
    times = f"{median:.2f} s per evaluation, {first:.2f} s with fresh trainers"
    return f"{kept[0]['backend']}; {times}; {check_memory(kept)}"


def fail_in_all_ways(ranks: int) -> Callable[[Host], str]:
    def run(host: Host) -> str:
        ways = [way for failing in FAILING_WAYS for way in ("", failing)]
        notes = host.search(ranks, [*ways, ""])
        expected = [
            "FAIL" if note["way"] in FAILING_WAYS and note["way"] != "hide" else "COMPLETE"
            for note in notes
        ]
        failures = {note["way"]: note["failure"][:90] for note in notes if note["state"] == "FAIL"}
        assert [note["state"] for note in notes] == expected, failures
        processes = [note["process"] for note in notes]
        assert all(processes[i] != processes[i + 1] for i in range(1, len(ways), 2)), (
            "a broken trainer was used again"
        )
        return f"{notes[0]['backend']}; {check_memory(notes)}; {failures}"

    return run


def time_out(ranks: int) -> Callable[[Host], str]:
    def run(host: Host) -> str:
        began = time.monotonic()
        notes = host.search(ranks, ["", "hang", ""], "--collective-timeout", "15s")
        assert [note["state"] for note in notes] == ["COMPLETE", "FAIL", "COMPLETE"]
        assert "timeout" in notes[1]["failure"], notes[1]["failure"]
        return (
            f"{notes[0]['backend']}; {time.monotonic() - began:.0f} s in all; "
            f"{notes[1]['failure'][:120]}"
        )

    return run


def train_with_torch_features(host: Host) -> str:
    ways = ["amp", "compile", "compile", "fsdp", "loader", ""]
    notes = host.search(1, ways)
    states = {note["way"]: note["state"] + note["failure"][:90] for note in notes}
    assert set(states.values()) == {"COMPLETE"}, states
    return f"{', '.join(ways[:-1])}; {check_memory(notes)}"


def reduce_values(ranks: int) -> Callable[[Host], str]:
    def run(host: Host) -> str:
        notes = host.search(ranks, ["", "", ""])
        assert {note["sum"] for note in notes} == {ranks * (ranks + 1) / 2}
        assert {note["backend"] for note in notes} == {"nccl"}
        return f"{len({note['uuid'] for note in notes})} GPU of the last rank, {notes[0]['device']}"

    return run


def train_search_space(name: str, *settings: str) -> Callable[[Host], str]:
    def run(host: Host) -> str:
        ranks, options = (
            min(2, host.gpus),
            [word for setting in settings for word in ("--set", setting)],
        )
        path = host.folder / name
        host.run(
            ranks, PROGRAM, name, "--run-dir", path, "--islands", 1, "--evaluations", 2, *options
        )
        losses = [trial.value for trial in load_trials(path)]
        assert None not in losses, losses
        host.run(
            ranks, PROGRAM, name, "--run-dir", path, "--resume", "--islands", 1, "--evaluations", 3
        )
        host.run(ranks, *make_hpo_command("check", name, *options)[1:])
        return f"losses {', '.join(f'{loss:.3f}' for loss in losses)}; resumed; hpo check passes"

    return run


def train_script(host: Host) -> str:
    (host.folder / "script.py").write_text(SCRIPT)
    options = (
        "--space",
        "lr=Float(0.1, 1)",
        "--loss",
        r"val_loss=(\S+)",
        "--evaluations",
        2,
        "--run-dir",
        "script",
    )
    host.run(min(2, host.gpus), *make_hpo_command("search", *options, "--", "script.py")[1:])
    states = {trial.state.name for trial in load_trials(host.folder / "script")}
    assert states == {"COMPLETE"}, states
    return ""


def check_cluster(host: Host) -> str:
    output = host.run(
        host.gpus, *make_hpo_command("check-cluster", "--run-dir", host.folder / "checked")[1:]
    )
    return "; ".join(line.strip() for line in output.splitlines() if "nccl" in line)


def lose_a_gpu(host: Host) -> str:
    """Let one of two workers fail as with a lost GPU, and require that it leaves the run."""
    code = (
        "import time\nfrom hpo import Int, SearchSpace\nspace = SearchSpace(k=Int(0, 999))\ndef "
        "objective(params, worker):\n    if worker.index == 1:\n        raise RuntimeError('CUDA "
        "error: uncorrectable ECC error encountered')\n    time.sleep(1)\n    yield params['k']\n"
    )
    (host.folder / "lost.py").write_text(code)
    output = host.run(
        2, PROGRAM, "lost.py", "--run-dir", "lost", "--ranks-per-worker", 1, "--evaluations", 10
    )
    assert "worker 1 (rank 1 on " in output, output
    return next(line for line in output.splitlines() if "has left the run" in line)[:150]


def list_steps(gpus: int) -> dict[str, Callable[[Host], str]]:
    small = ("epochs=1", "train_samples=512", "validation_samples=128")
    steps: dict[str, Callable[[Host], str]] = {
        "reuse, 30 evaluations of alternating sizes": reuse_trainers,
        "failures, one rank": fail_in_all_ways(1),
        "failures, two ranks on one GPU": lambda host: fail_in_all_ways(2)(replace_gpus(host, "0")),
        "a rank hangs, two ranks on one GPU": lambda host: time_out(2)(replace_gpus(host, "0")),
        "AMP, compile, FSDP2, pinned memory": train_with_torch_features,
        "digits_cnn": train_search_space("digits_cnn", "epochs=2"),
        "cifar10_resnet, bfloat16": train_search_space(
            "cifar10_resnet", "dataset=digits", "precision=bfloat16", *small
        ),
        "text_transformer, shard, float16": train_search_space(
            "text_transformer", "epochs=1", "parallel=shard", "precision=float16"
        ),
        "a script for torchrun": train_script,
        "hpo check-cluster": check_cluster,
    }
    if gpus > 1:
        for ranks in (2, 4)[: 1 + (gpus >= 4)]:
            steps[f"nccl, {ranks} GPUs"] = reduce_values(ranks)
            steps[f"nccl, {ranks} GPUs, failures"] = fail_in_all_ways(ranks)
            steps[f"nccl, {ranks} GPUs, a rank hangs"] = time_out(ranks)
        steps["text_transformer, pipeline"] = train_search_space(
            "text_transformer", "epochs=1", "parallel=pipeline"
        )
        steps["one of two workers loses its GPU"] = lose_a_gpu
    return steps


def replace_gpus(host: Host, visible: str) -> Host:
    return Host(host.folder, host.gpus, {**host.variables, "CUDA_VISIBLE_DEVICES": visible})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "steps", nargs="*", help="parts of the names of the steps to run; all by default"
    )
    arguments = parser.parse_args()
    done = subprocess.run(
        [sys.executable, "-c", FACTS], capture_output=True, text=True, check=False, timeout=120
    )
    facts = done.stdout.strip()
    gpus = int(facts.split()[0]) if facts else 0
    if not gpus:
        sys.exit(f"no GPU: {facts or done.stderr.strip().splitlines()[-1]}")
    rows = [
        f"{facts}; Python {platform.python_version()}",
        "",
        "| step | seconds | result |",
        "|---|---|---|",
    ]
    failures = 0
    with tempfile.TemporaryDirectory() as name:
        for title, step in list_steps(gpus).items():
            if arguments.steps and not any(part in title for part in arguments.steps):
                continue
            began = time.monotonic()
            try:
                folder = Path(name, str(len(rows)))
                folder.mkdir()
                result = step(Host(folder, gpus))
            except Exception as error:
                failures += 1
                traceback.print_exc()
                result = f"**failed**: {type(error).__name__}: {error}"
            row = (
                f"| {title} | {time.monotonic() - began:.0f} | "
                f"{' '.join(result.split()).replace('|', '/')[:500]} |"
            )
            rows.append(row)
            print(row, flush=True)
    print("", *rows, sep="\n")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
