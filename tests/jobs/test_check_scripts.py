"""Test `hpo check` with scripts whose losses depend on the number of ranks."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.checks import check_ways, join_points
from tests.support.launch import HPO, SCRIPTS, Mpi
from tests.support.limits import scale
from tests.support.run_output import load_trials

AVERAGING = f"""
from dataclasses import dataclass
from hpo import Float, Script, SearchSpace

space = SearchSpace(lr=Float(1e-3, 1e-1, log=True))


@dataclass(frozen=True)
class Settings:
    way: str = ""


objective = Script({str(SCRIPTS / "averaging.py")!r}, "--way", "{{way}}", loss=r"val_loss=(\\S+)")
"""
SAME = "ok     All ranks have the same network after 10 steps, and train on different batches\n"
EQUAL = "ok     2 ranks and 1 rank have the same losses, "


def test_check_of_averaging_by_hand_is_not_wrong(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "averaging.py").write_text(AVERAGING)
    told = {
        "gradients": EQUAL,
        "flat": EQUAL,
        "parts": EQUAL,
        "weights": "look   The ranks average their weights, not their gradients ",
        "noise": "look   Sequential (1): each rank draws random numbers for its own share",
    }
    found = check_ways(mpi, tmp_path, list(told), tmp_path / "averaging.py")
    for (way, point), (status, printed) in zip(told.items(), found, strict=True):
        assert status == 0, f"{way}: {printed}"
        assert "\nNothing is wrong" in printed, f"{way}: {printed}"
        assert point in printed, f"{way}: {printed}"
        assert SAME in printed, f"{way}: {printed}"


NAMING = """
import argparse, os, torch
parser = argparse.ArgumentParser()
parser.add_argument("--devices", type=int, default=2)
args = parser.parse_args()
torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1, bias=False))
half = torch.randn(32, 4)
inputs = torch.stack([half, -half], dim=1).flatten(0, 1)  # Each half has the same loss.
own = inputs[torch.distributed.get_rank() :: args.devices]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    (model(own) - own.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        total = (model.module(own) - own.sum(1, keepdim=True)).square().sum()
    torch.distributed.all_reduce(total)
    print("val_loss", total.item() / 64)
torch.distributed.destroy_process_group()
"""


def test_option_that_names_the_ranks_is_not_wrong(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(NAMING)
    check = [*HPO, "check", "--loss", r"val_loss (\S+)", "--", "train.py"]
    job = mpi.run(2, *check, cwd=tmp_path)
    printed = join_points(job.stdout)
    assert job.returncode == 0, printed
    assert "look   The options of the program may name the number of ranks" in printed, printed
    job = mpi.run(2, *check, "--devices", "{ranks}", cwd=tmp_path)
    printed = join_points(job.stdout)
    assert (job.returncode, EQUAL in printed) == (0, True), printed


def test_check_tries_to_resume_from_own_files(mpi: Mpi, tmp_path: Path) -> None:
    resume = "--resume-args=--mode resume"
    told = {
        (resume, "--resume-file", "state.json"): "ok     After a resume from the first checkpoint, "
        "the losses are the same",
        (resume, "--resume-file", "last.json"): "wrong  There is no checkpoint in {folder} after "
        "the first loss, so it restarts",
        (resume, "--resume-file", "last.json", "--step", r"epoch (\d+)"): "look   There is no "
        "checkpoint in {folder} after the first loss, so it restarts",
        (
            "--resume-args",
            "--mode again --load {folder}/checkpoint-1",
        ): "wrong  The evaluation cannot resume from its checkpoint: rank 0: resuming.py ended "
        "with status 1; its last line on stderr: --mode: invalid choice again With --resume-args",
        (
            "--resume-args",
            "--forgets --load {folder}/checkpoint-1",
        ): "wrong  After a resume from the first checkpoint, the losses differ by 50.0%",
    }
    for options, point in told.items():
        check = [*HPO, "check", "--loss", r"loss (\S+)", *options, "--", SCRIPTS / "resuming.py"]
        more = ["--out", "{folder}", "--seconds", scale(0.6)]
        job = mpi.run(1, *check, *more, cwd=tmp_path)
        assert job.returncode == int("wrong" in point), job.stdout
        assert point in join_points(job.stdout)


CONTAMINATED = """
import json, os, sys
path = '../state.json' if 'continues' in sys.argv else 'state.json'
start, loss = 0, 8.0 + float(sys.argv[-1])
if os.path.exists(path):
    start, loss = json.load(open(path))
log = open('log.txt', 'a+')
if os.path.exists('data.json'):
    json.load(open('data.json'))
else:
    json.dump(1, open('data.json', 'w'))
for epoch in range(start if 'continues' in sys.argv else 0, 3):
    loss /= 2
    if os.environ['RANK'] == '0':
        json.dump([epoch + 1, loss], open(path, 'w'))
        print(f'epoch {epoch} loss {loss}', flush=True)
"""


def test_files_of_an_earlier_evaluation_are_noticed(mpi: Mpi, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "train.py").write_text(CONTAMINATED)
    written = "which an earlier evaluation has probably written"
    resumes = f"state.json, {written}. If it resumes from there, its losses do not belong to its "
    other = tmp_path / "state.json"
    told = {
        ("check", "restarts"): f"look   It has read {resumes}",
        ("search", "restarts"): f"warning: trial 1: it has read {resumes}",
        ("check", "continues"): f"; it has read {other}, {written}",
        ("search", "continues"): f"; it has read {other}, {written}",
    }
    for (command, way), text in told.items():
        for path in (other, folder / "state.json", folder / "data.json"):
            path.unlink(missing_ok=True)
        options = ["--run-dir", way, "--evaluations", 2] if command == "search" else []
        options += ["--space", "x=Float(0.0, 1.0)", "--loss", r"loss (\S+)"]
        job = mpi.run(1, *HPO, command, *options, "--", "train.py", way, cwd=folder)
        if command == "search":
            trials = load_trials(folder / way)
            printed = job.stderr + str([trial.user_attrs.get("failure") for trial in trials])
        else:
            printed = join_points(job.stdout)
        # A line of a finding may end at a hyphen of the path.
        assert text.replace(" ", "") in printed.replace(" ", ""), printed
        assert "data.json, which" not in printed
        assert "log.txt, which" not in printed


def test_check_shows_the_reason_on_1_rank_if_it_differs(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os\nraise ValueError('alone' if os.environ['WORLD_SIZE'] == '1' else 'together')\n"
    )
    job = mpi.run(2, *HPO, "check", "--", "train.py", cwd=tmp_path)
    printed = join_points(job.stdout)
    assert re.search(r"wrong  The evaluation fails on 2 ranks and on 1: .*: together", printed)
    assert "look   On 1 rank, the reason is another: rank 0, train.py:2: ValueError: al" in printed


def test_redirected_output_is_not_a_file_of_the_program(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('loss 1')\nopen('mine.txt', 'a').write('x')\n")
    check = ["check", "--loss", r"loss (\S+)", "--", "train.py"]
    with (tmp_path / "check.log").open("w") as log:
        job = mpi.start(1, *HPO, *check, cwd=tmp_path, stdout=log.fileno())
        job.communicate(timeout=scale(60))
    assert job.returncode == 0
    printed = join_points((tmp_path / "check.log").read_text())
    assert "look   Evaluations write to the same files: mine.txt Workers" in printed, printed


def test_check_shows_what_a_search_would_warn_about(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "for part in range(3):\n    print(f'Test: [{part}/3] loss {part}')\n"
    )
    job = mpi.run(2, *HPO, "check", "--loss", r"loss (\S+)", "--", "train.py", cwd=tmp_path)
    assert job.stderr == ""
    printed = join_points(job.stdout)
    point = "look   --loss has matched 'Test: [0/3] loss 0' and 'Test: [1/3] loss 1'. If this is "
    assert printed.count(point) == 1, printed


def test_check_of_ranks_that_forget_each_other_is_wrong(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "averaging.py").write_text(AVERAGING)
    told = {
        "forgotten": (
            r"wrong  The networks of rank 0 and rank 1 differ after 1 step .* average the "
            r"gradients over all"
        ),
        "same": r"wrong  Each of 2 ranks trains on the same batches 2 ranks then do the work of 1",
    }
    found = check_ways(mpi, tmp_path, list(told), tmp_path / "averaging.py")
    for (way, point), (status, printed) in zip(told.items(), found, strict=True):
        assert status == 1, f"{way}: {printed}"
        assert re.search(point, printed), f"{way}: {printed}"
        assert "\n1 problem, 1 finding to look at\n" in printed, f"{way}: {printed}"
        assert "All ranks have the same network" not in printed, f"{way}: {printed}"


def test_check_of_batches_drawn_by_each_rank_is_not_wrong(mpi: Mpi, tmp_path: Path) -> None:
    check = [*HPO, "check", "--loss", r"val loss (\S+)", "--", SCRIPTS / "drawing.py"]
    job = mpi.run(2, *check, cwd=tmp_path)
    printed = join_points(job.stdout)
    assert (job.returncode, job.stderr) == (0, ""), printed
    assert (
        "look   The samples differ from those on 1 rank, so gradients and losses cannot be "
        "compared: batches are drawn or changed at random"
    ) in printed
    assert re.search(
        "ok     All ranks have the same network after .* steps, and train on different batches\n",
        printed,
    )
    assert "\nNothing is wrong, 2 findings to look at\n" in printed
    job = mpi.run(2, *check, "--rank_has_own_seed=False", cwd=tmp_path)
    printed = join_points(job.stdout)
    assert (job.returncode, job.stderr) == (1, ""), printed
    assert (
        "wrong  Each of 2 ranks trains on the same batches 2 ranks then do the work of 1" in printed
    )
    assert "\n1 problem, 1 finding to look at\n" in printed


def test_check_sees_a_program_that_ends_with_its_last_loss(mpi: Mpi, tmp_path: Path) -> None:
    slow_exit = "import atexit, time\natexit.register(time.sleep, 2.5)\n"
    code = (SCRIPTS / "drawing.py").read_text()
    printing = code[code.index("    if iteration % 10") : code.index("    for micro_step")]
    code = code.replace(printing, "")
    end_of_step = "    optimizer.zero_grad()\n"
    assert code.count(end_of_step) == 1
    code = code.replace(end_of_step, end_of_step + printing)
    (tmp_path / "train.py").write_text(slow_exit + code)
    job = mpi.run(2, *HPO, "check", "--loss", r"val loss (\S+)", "--", "train.py", cwd=tmp_path)
    assert job.returncode == 0, job.stdout
    rows = re.findall(
        r"^ *(?:2 ranks, again|2 ranks|1 rank) +\S+ +\S+ +\S+ +(\d+)", job.stdout, re.MULTILINE
    )
    assert rows == ["21"] * 3, job.stdout


WITHOUT_OPTIMIZER = """
import torch
torch.manual_seed(1)
network = torch.nn.Linear(4, 1)
inputs = torch.randn(32, 4)
for epoch in range(3):
    loss = ((network(inputs) - inputs.sum(1, keepdim=True)) ** 2).mean()
    loss.backward()
    for parameter in network.parameters():
        parameter.data.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None
    print(f'loss {loss.item()}')
"""


def test_check_of_ranks_alone_without_an_optimizer_is_wrong(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WITHOUT_OPTIMIZER)
    job = mpi.run(2, *HPO, "check", "--loss", r"loss (\S+)", "--", "train.py", cwd=tmp_path)
    assert job.returncode == 1, job.stdout
    assert "wrong  The program reads neither RANK, LOCAL_RANK nor" in join_points(job.stdout)
