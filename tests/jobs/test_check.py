"""Test `hpo check` in MPI jobs: correct search files pass, and each usual mistake is reported."""

from __future__ import annotations

import getpass
import json
import os
import pty
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.checks import MISTAKEN, check_search, check_ways, join_points
from tests.support.docs import example
from tests.support.launch import (
    FASHION_MNIST,
    HPO,
    PROGRAM,
    ROOT,
    Mpi,
    make_hpo_command,
    needs_fashion_mnist,
    run_hpo,
    wait_for_job,
)
from tests.support.limits import scale

EVERYWHERE = "wrong  The evaluation fails on 2 ranks and on 1: "
TOGETHER = "wrong  The evaluation fails on 2 ranks, but not on 1: "
WAIT = "The ranks of a worker must call the same collectives"
EPOCHS = "The ranks must train the same number of epochs"
LINE = r"mistaken\.py:\d+"

# The most frequent mistakes: docs/operation/troubleshooting.md.
TOLD = {
    "own loss": (
        f"{TOGETHER}the ranks yielded different losses: rank 0 .* Add up the sums over all ranks"
    ),
    "epochs": f"{TOGETHER}timeout: .* {EPOCHS}",
    "early stopping": f"{TOGETHER}timeout: .* {EPOCHS}",
    "rank 0 alone": (
        f"{TOGETHER}the ranks are in different collectives: rank 0 barrier at {LINE}, rank 1 .* "
        f"{WAIT}"
    ),
    "unequal steps": (
        rf"{TOGETHER}the ranks are in different collectives: rank 0 allreduce of float \[212\] at "
        rf"{LINE}, "
        rf"rank 1 allreduce of float \[\] at {LINE} {WAIT}"
    ),
    "dataset in file": (
        f"{EVERYWHERE}.* exited unexpectedly .* Leave multiprocessing_context out, or put the "
        f"Dataset"
    ),
    "unused": (
        rf"{EVERYWHERE}.*Expected to have finished .* \(aside\.bias and aside\.weight\)\. Freeze "
        rf"them"
    ),
    "returned": (
        f"{EVERYWHERE}.* yielded no loss, but returned 0.5: .* Yield the validation loss after "
        f"each epoch"
    ),
    "none elsewhere": f"{TOGETHER}.* got None Every rank must yield the loss. .* dist.broadcast",
    "path": f"{EVERYWHERE}.*'data/train.csv' .* Make the path a setting",
    "nan": f"{EVERYWHERE}.*the validation loss is nan .* narrow the learning rate",
}

# Mistakes that a run does not report.
UNTOLD = {
    "unwrapped call": (
        "wrong  The networks of rank 0 and rank 1 differ after 1 step .* and call model"
    ),
    "weights by rank": (
        "wrong  The networks of rank 0 and rank 1 differ before the first step .* Wrap it"
    ),
    "uneven": "wrong  The ranks take different numbers of steps: rank 0 20, rank 1 15",
    "mean of means,batch=15": (
        r"wrong  The gradients of the first step differ .* by \d.\d% .* reduction='sum'"
    ),
    "scale": r"wrong  The gradients of the first step are 0.5 times .* \(loss \* worker.size / len",
    "order": "wrong  Of the 200 samples of 1 rank's first epoch, 2 ranks train on 1.*worker.seed",
    "wrong mean": "wrong  The losses are 2 times those of 1 rank Divide the sum",
    "prefix": (
        r"wrong  The names .* begin with module.: module.first.bias, .*model.module.state_dict\(\)"
    ),
    "no offer": (
        "wrong  No weights are offered, .* and `test` will not be called Call worker.offer_weights"
    ),
    "test": r"wrong  `test` fails with the offered weights: mistaken\.py:\d+: KeyError: 'missing'",
    "no optimizer": (
        r"wrong  After a resume .*, the losses differ by \d.* Save all that training changes"
    ),
    "saved late": (
        r"wrong  After a resume .*, the number of losses is \d instead of \d Save all .* before "
        "the loss"
    ),
    "not restored": "wrong  The evaluation saves checkpoints, but restarts .* At the start, load",
    "saved model": (
        r"wrong  The evaluation cannot resume from its checkpoint: rank \d, mistaken.*Missing"
    ),
    "global network": (
        "wrong  The same seed .* the initial weights differ Create the network and its weights"
    ),
}

# Differences that are not mistakes.
DIFFERENT = {
    "norm": r"look   BatchNorm1d \(1\): each rank normalizes with its own share .*SyncBatchNorm",
    "dropout": (
        r"look   Dropout \(1\): each rank draws random numbers for its own share.*probability of 0"
    ),
    "augmented": "look   The samples differ from those .* check once without augmentation",
    "growing batch": (
        "look   An epoch has 5 steps on 2 ranks and 10 on 1: .* batch_size // worker.size"
    ),
    "no share": "look   Each of 2 ranks trains on the same batches .* Let each rank take its share",
    "no share or order": (
        "look   Each of 2 ranks trains on all 200 samples, .* Let each rank take its share"
    ),
    "drawn": "look   The samples differ from those .* batches are drawn or changed at random",
    "checkpoint": "look   The same seed on 2 ranks: the second evaluation took no step",
    "unseeded": "look   The same seed .* from the same initial weights .* without worker.seed",
    "idle": (
        "look   2 parameters of the optimizer never had a gradient: aside.bias and aside.weight"
    ),
}

# Ways that a trainer can take though its rank could not.
RIGHT = ["none", "fork", "torchrun", "init"]


def test_check_finds_usual_mistakes_with_advice(mpi: Mpi, tmp_path: Path) -> None:
    for (way, told), (status, printed) in zip(
        TOLD.items(), check_ways(mpi, tmp_path, list(TOLD)), strict=True
    ):
        assert re.search(told, printed), f"{way}: {printed}"
        assert status == 1, way
        assert "\n1 problem\n" in printed, f"{way}: one mistake is one finding: {printed}"


def test_check_finds_mistakes_that_a_run_does_not_report(mpi: Mpi, tmp_path: Path) -> None:
    for (way, told), (status, printed) in zip(
        UNTOLD.items(), check_ways(mpi, tmp_path, list(UNTOLD)), strict=True
    ):
        assert re.search(told, printed), f"{way}: {printed}"
        assert status == 1, way
        assert re.search(r"\n1 problem(, 1 finding to look at)?\n", printed), f"{way}: {printed}"


def test_check_marks_harmless_differences_as_look(mpi: Mpi, tmp_path: Path) -> None:
    for (way, told), (status, printed) in zip(
        DIFFERENT.items(), check_ways(mpi, tmp_path, list(DIFFERENT)), strict=True
    ):
        assert re.search(told, printed), f"{way}: {printed}"
        assert status == 0, way
        assert "\nNothing is wrong, " in printed, f"{way}: {printed}"


def test_check_accepts_torchrun_code_and_forking_loaders(mpi: Mpi, tmp_path: Path) -> None:
    for way, (status, printed) in zip(RIGHT, check_ways(mpi, tmp_path, RIGHT), strict=True):
        assert status == 0, f"{way}: {printed}"
        assert printed.endswith("\nNothing is wrong\n"), f"{way}: {printed}"


def test_check_that_finds_a_mistake_ends_with_status_1(mpi: Mpi, tmp_path: Path) -> None:
    status, printed = check_search(mpi, 2, tmp_path, MISTAKEN, "way=own loss")
    assert status == 1, printed
    assert printed.endswith("\n1 problem\n")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("way=path in prepare", r"mistaken\.py: .*No such file or directory: 'data/train\.csv'"),
        ("bach=3", "--set bach=3: .* has no setting 'bach'; did you mean batch"),
    ],
)
def test_check_with_a_usage_error_prints_one_message(
    mpi: Mpi, tmp_path: Path, setting: str, message: str
) -> None:
    job = mpi.run(2, *HPO, "check", MISTAKEN, "--set", setting, cwd=tmp_path)
    assert (job.returncode, job.stdout) == (2, "")
    assert re.match(f"error: .*{message}", job.stderr), job.stderr


# Short settings for the shipped search spaces; one without any here takes what it has.
SHORT = {
    "digits_cnn": ["epochs=2"],
    "cifar10_resnet": [
        "dataset=digits",
        "epochs=2",
        "train_samples=64",
        "validation_samples=16",
        "batch_size=64",
    ],
    "text_transformer": [
        "context=16",
        "epochs=2",
        "train_samples=64",
        "validation_samples=32",
        "batch_size=16",
    ],
    "mnist_cnn": [
        "dataset=fashion-mnist",
        f"data_dir={FASHION_MNIST}",
        "epochs=2",
        "train_samples=300",
        "validation_samples=100",
    ],
}


@pytest.mark.parametrize(
    "search", sorted((ROOT / "search_spaces").glob("*.py")), ids=lambda path: path.stem
)
@needs_fashion_mnist
def test_check_passes_shipped_search_spaces(mpi: Mpi, tmp_path: Path, search: Path) -> None:
    status, printed = check_search(mpi, 2, tmp_path, search, *SHORT.get(search.stem, []))
    assert status == 0, printed
    found = [line for line in printed.splitlines() if line.startswith(("ok", "look", "wrong"))]
    same = r"ok     2 ranks and 1 rank have the same losses, .*\n"
    if search.stem == "cifar10_resnet":  # Losses are equal except for rounding errors, which grow.
        same = (
            rf"({same}|look   The losses of 2 ranks and of 1 rank differ by .*\nlook   "
            rf"SharedBatchNorm \(20\): .*\n)"
        )
    branches = ""
    if search.stem == "cifar10_resnet":  # The momentum is that of SGD.
        branches = r"ok     1 individual of other branches of the space can be evaluated\n"
    assert re.fullmatch(
        rf"{branches}ok     The same seed on 2 ranks has the same losses twice, to the last digit\n"
        rf"{same}"
        r"ok     All parameters of the optimizer had gradients\n"
        r"ok     The offered weights have \d+ tensors\n"
        r"ok     `test` accepts the offered weights, and takes .*\n"
        r"ok     After a resume from the first checkpoint, the losses are the same, to the last "
        r"digit",
        "\n".join(found),
    ), printed


def test_check_compares_any_number_of_ranks_with_one(mpi: Mpi, tmp_path: Path) -> None:
    for ranks in (1, 3):
        status, printed = check_search(mpi, ranks, tmp_path, MISTAKEN)
        assert status == 0, printed
        rows = re.findall(
            r"^ (\d) ranks?(, again)? +1\.335 +1\.28\d +10 +\d+\.\d( +\d+)( \d+)*$",
            printed,
            re.MULTILINE,
        )
        assert [row[0] for row in rows] == (["3", "3", "1"] if ranks == 3 else ["1", "1"]), printed
        assert ("3 ranks and 1 rank have the same losses" in printed) == (ranks == 3)
        assert ("Only 1 rank was checked" in printed) == (ranks == 1)


@pytest.mark.parametrize(
    ("page", "name", "ranks"), [("pipeline", "my_pipeline.py", 3), ("fsdp", "my_sharded.py", 2)]
)
def test_check_accepts_networks_in_parts(
    mpi: Mpi, tmp_path: Path, page: str, name: str, ranks: int
) -> None:
    """With three pipeline stages, torch's check of collectives fails the first evaluation.

    `hpo check` must still accept the network. Batches are larger than on the page, so that an epoch
    has 5 steps.
    """
    code = example(f"docs/training/{page}.md", name)
    assert code.count(".split(56)") == 1
    (tmp_path / name).write_text(code.replace(".split(56)", ".split(280)"), "utf-8")
    status, printed = check_search(mpi, ranks, tmp_path, name)
    assert status == 0, printed
    assert re.search(rf"^ {ranks} ranks +\d\.\d+ +\d\.\d+ +\d\.\d+ +5 ", printed, re.MULTILINE), (
        printed
    )
    assert "\nNothing is wrong" in printed


def test_check_reports_whether_an_evaluation_resumes(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text(
        example("docs/training/checkpoints.md", "my_long_search.py"), "utf-8"
    )
    status, printed = check_search(mpi, 2, tmp_path, "long.py", "epochs=3")
    assert status == 0, printed
    assert (
        "ok     After a resume from the first checkpoint, the losses are the same, to the last"
        in printed
    ), printed
    (_, right), (_, none), (_, short) = check_ways(
        mpi, tmp_path, ["saves", "none", "saves,epochs=1"]
    )
    assert (
        "ok     After a resume from the first checkpoint, the losses are the same, to the last"
        in right
    ), right
    assert (
        "ok     No checkpoint is saved. It is optional: without one, an interrupted evaluation "
        "restarts" in none
    ), none
    assert (
        "look   The only checkpoint belongs to the only loss Set epochs=2 to check that it resumes"
        in short
    ), short


def test_check_uses_the_first_enqueued_and_leaves_no_files(
    mpi: Mpi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "start.json").write_text(
        json.dumps([{"width": 9, "lr": 0.5, "act": "relu"}, {"width": 10}])
    )
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    job = mpi.run(2, *HPO, "check", MISTAKEN, "--enqueue", "start.json", cwd=tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    assert job.stdout.startswith(
        f"{MISTAKEN}: width=9  lr=0.5  act=relu\ntwice on 2 ranks, and once on 1 rank;"
    )
    assert join_points(job.stdout).endswith("\nNothing is wrong\n")
    torchs = tmp_path / "temporary" / f"torchinductor_{getpass.getuser()}"
    if torchs.is_dir():
        torchs.rmdir()  # torch._dynamo makes it when it is imported, and leaves it empty
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["start.json", "temporary"]


def test_check_stops_on_a_signal(mpi: Mpi, tmp_path: Path) -> None:
    job = mpi.start(2, "-u", *HPO, "check", MISTAKEN, "--set", "way=slow", cwd=tmp_path)
    assert job.stdout is not None
    assert job.stdout.readline().startswith(str(MISTAKEN))
    time.sleep(3)  # it is in the objective, or about to be
    told = time.monotonic()
    job.send_signal(signal.SIGUSR1)
    ended = wait_for_job(job, 30)
    assert time.monotonic() - told < scale(15)
    assert ended.returncode == 130
    assert ended.stdout.endswith("Stopped: SIGUSR1\n")


ASKING = """
from hpo import Float, SearchSpace
space = SearchSpace(x=Float(0, 1))


def objective(params, worker):
    answer = 42
    breakpoint()
    print("went on")
    return params["x"]
"""


@pytest.mark.mpi
def test_breakpoint_on_one_rank_reads_standard_input(tmp_path: Path) -> None:
    (tmp_path / "asking.py").write_text(ASKING)
    ended = run_hpo("check", "asking.py", cwd=tmp_path, typed="p answer\nc\nc\n")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "(Pdb) 42\n" in ended.stdout
    assert ended.stdout.count("(Pdb) went on\n") == 2
    assert "ok     The same seed on 1 rank has the same losses twice" in ended.stdout


@pytest.mark.mpi
def test_breakpoint_on_one_rank_works_in_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "asking.py").write_text(ASKING)
    terminal, end = pty.openpty()
    job = subprocess.Popen(
        make_hpo_command("check", "asking.py"), cwd=tmp_path, stdin=end, stdout=end, stderr=end
    )
    os.close(end)
    shown = b""
    try:
        for command in (b"p answer + 1", b"c", b"c"):
            while not shown.endswith(b"(Pdb) "):
                shown += os.read(terminal, 4096)
            os.write(terminal, command + b"\n")
            shown += os.read(terminal, 4096)
        with suppress(OSError):  # the other end is closed
            while part := os.read(terminal, 4096):
                shown += part
        assert job.wait(30) == 0, shown
    finally:
        job.kill()
        job.wait()
        os.close(terminal)
    assert b"\r\n43\r\n" in shown
    assert shown.count(b"\nwent on\r\n") == 2
    assert b"Nothing is wrong" in shown


def test_search_does_not_import_the_check(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "quick.py").write_text(
        "import sys\n"
        "from hpo import Float, SearchSpace\n"
        "space = SearchSpace(x=Float(0, 1))\n\n\n"
        "def objective(params, worker):\n"
        "    return float(sum(name.startswith('hpo.check') for name in sys.modules))\n"
    )
    job = mpi.run(1, PROGRAM, "quick.py", "--evaluations", 1, "--run-dir", "run", cwd=tmp_path)
    assert job.returncode == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["best"]["loss"] == 0


def test_check_evaluates_each_branch_of_the_space(mpi: Mpi, tmp_path: Path) -> None:
    source = (
        "from hpo import Categorical, Float, SearchSpace\n"
        "space = SearchSpace(\n"
        "    optimizer=Categorical('sgd', 'adam', 'lion'),\n"
        "    momentum=Float(0.0, 0.9, when={'optimizer': 'sgd'}),\n"
        "    beta=Float(0.8, 0.9, when={'optimizer': 'adam'}),\n"
        ")\n\n"
        "def objective(params, worker):\n"
        "    if params['optimizer'] == BROKEN:\n"
        "        raise ValueError('it is not installed')\n"
        "    yield 0.5\n"
    )
    (tmp_path / "broken.py").write_text(f"BROKEN = 'lion'\n{source}")
    (tmp_path / "whole.py").write_text(f"BROKEN = ''\n{source}")
    status, output = check_search(mpi, 1, tmp_path, "broken.py")
    assert status == 1
    assert "and 2 individuals of other branches once" in output
    assert re.search(r"wrong  The evaluation fails with optimizer=lion: .*it is not", output)
    status, output = check_search(mpi, 1, tmp_path, "whole.py")
    assert status == 0
    assert "ok     2 individuals of other branches of the space can be evaluated" in output
