"""Test searches on GPUs that pretend (tests/fake_gpu): ranks, devices and memory.

Kernels compute nothing there, so no test looks at values that a GPU has computed.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.fake_gpu.build import build_fake_gpu, find_obstacle
from tests.support.launch import (
    PROGRAM,
    SEARCHES,
    make_hpo_command,
    wait_for_job,
    write_changed_program,
)
from tests.support.limits import scale
from tests.support.run_output import load_trials

SEARCH = SEARCHES / "on_gpus.py"
pytestmark = pytest.mark.skipif(bool(find_obstacle()), reason=find_obstacle())


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return build_fake_gpu(tmp_path_factory.mktemp("fake_gpu"))


@dataclass
class GpuHost:
    """A host with fake GPUs, on which a test runs searches in `folder`."""

    folder: Path
    variables: dict[str, str]
    output: str = field(default="", init=False)

    def run(
        self,
        ranks: int,
        *arguments: object,
        program: Path = PROGRAM,
        expected: int = 0,
        **others: str,
    ) -> None:
        """Run a search of tests/searches/on_gpus.py, and check its exit status.

        `others` are environment variables.
        """
        options = (SEARCH, "--run-dir", "run", "--set", f"folder={self.folder}", *arguments)
        self.run_command(
            ["mpirun", "-n", ranks, sys.executable, program, *options], expected, **others
        )

    def run_command(self, command: Sequence[object], expected: int = 0, **others: str) -> None:
        """Run a command on this host, and check its exit status."""
        environment = {**os.environ, **self.variables, **others}
        job = subprocess.Popen(
            list(map(str, command)),
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        done = wait_for_job(job, 200)
        self.output = done.stdout
        assert done.returncode == expected, self.output

    def run_ways(self, ranks: int, ways: str, *arguments: object, **options: Any) -> None:
        """Run one evaluation for each of these ways on one worker, in turn.

        `options` are those of `run`.
        """
        count = len(ways.split(","))
        (self.folder / "given.json").write_text(json.dumps([{"k": k} for k in range(count)]))
        worker = (
            "--islands",
            1,
            "--ranks-per-worker",
            ranks,
            "--evaluations",
            count,
            "--enqueue",
            "given.json",
        )
        self.run(ranks, *worker, "--set", f"ways={ways}", *arguments, **options)

    def read_notes(self) -> dict[str, dict[str, Any]]:
        """Return what the evaluations have noted, by hyperparameter and rank."""
        return {
            path.stem: json.loads(path.read_text()) for path in sorted(self.folder.glob("*-?.json"))
        }

    def find_processes(self, rank: int) -> list[int]:
        """Return the trainers of one rank of the only worker, in the order of the evaluations."""
        notes = self.read_notes()
        return [
            notes[f"{k}-{rank}"]["process"] for k in range(len(notes)) if f"{k}-{rank}" in notes
        ]

    def read_events(self, name: str) -> list[tuple[int, int]]:
        """Return the processes and the values of the fake's events with this name."""
        lines = [line.split() for line in (self.folder / "events").read_text().splitlines()]
        return [(int(process), int(value)) for process, event, value in lines if event == name]

    def run_python(self, code: str) -> str:
        """Run Python code in a process on this host, and return its output."""
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command,
            env={**os.environ, **self.variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=scale(100),
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def host(libraries: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GpuHost:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    files = {"FAKE_GPU_TABLE": str(tmp_path / "table"), "FAKE_GPU_LOG": str(tmp_path / "events")}
    return GpuHost(tmp_path, {**libraries, **files, "FAKE_GPUS": "4"})


@pytest.mark.mpi
def test_ranks_use_own_gpus_and_keep_their_trainers(host: GpuHost) -> None:
    host.run(4, "--ranks-per-worker", 2, "--islands", 1, "--evaluations", 6)
    notes = host.read_notes()
    assert len(notes) == 12
    assert "2 workers of 2, 1 island, 1 host, 4 GPUs (Fake H100), 1 per rank, nccl" in host.output
    assert {(one["worker"], one["rank"], one["uuid"]) for one in notes.values()} == {
        (worker, rank, f"0{1 + 2 * worker + rank}") for worker in range(2) for rank in range(2)
    }
    assert all(one["device"] == f"cuda:{one['local']}" for one in notes.values())
    assert {one["backend"] for one in notes.values()} == {"nccl"}
    assert len({one["process"] for one in notes.values()}) == 4, "one trainer for each rank"
    assert len({one["free"] for one in notes.values()}) == 1, "evaluations leave memory behind"
    templates = {one["template"] for one in notes.values()}
    assert len(templates) == 1
    assert not templates & {process for process, _ in host.read_events("cuInit")}, (
        "the template has asked the driver"
    )
    assert json.loads((host.folder / "test.json").read_text())["free"] > 79, (
        "trainers run beside the final test"
    )


@pytest.mark.mpi
def test_code_of_users_fails_or_replaces_only_what_it_must(host: GpuHost) -> None:
    host.run_ways(2, "none,tf32,default,named,cycle,keep,none,thread,none,lose,none,hide,none")
    first, second = host.find_processes(0), host.find_processes(1)
    # The trainers of both ranks are replaced after keep, thread (on rank 0 alone), lose and hide.
    expected = [0, 0, 0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4]
    for processes in (first, second):
        assert [
            sorted(set(processes), key=processes.index).index(process) for process in processes
        ] == expected
    trials = load_trials(host.folder / "run")
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * 9 + ["FAIL"] + ["COMPLETE"] * 3
    name = socket.gethostname()
    ids = [f"{0:08}-0000-0000-0000-{number:012}" for number in range(1, 5)]
    places = {name: 2}, {name: ids}  # Each rank has two of the four GPUs.
    for trial in trials:
        assert (trial.user_attrs["hosts"], trial.user_attrs["gpus"]) == places
    assert "CUDA error: unspecified launch failure" in trials[9].user_attrs["failure"]
    assert "must yield" not in trials[9].user_attrs["failure"]
    assert "trial 5: it leaves GPU memory behind" in host.output
    assert "(5368709120,) torch.uint8, 5120 MiB" in host.output
    assert len({one["free"] for one in host.read_notes().values()}) == 1, (
        "evaluations leave memory behind"
    )


@pytest.mark.mpi
def test_group_is_not_destroyed_on_some_ranks_only(host: GpuHost) -> None:
    """NCCL's destructor may wait for all ranks of the group."""
    host.run_ways(2, "thread,none", FAKE_NCCL_COLLECTIVE_DESTROY="1")
    assert len(set(host.find_processes(0))) == len(set(host.find_processes(1))) == 2
    assert not host.read_events("ncclDestroy")


@pytest.mark.mpi
@pytest.mark.parametrize("variable", ["FAKE_GPU_EXCLUSIVE", "FAKE_GPU_SLOW_FREE"])
def test_trainer_starts_when_the_last_one_has_left_the_gpu(host: GpuHost, variable: str) -> None:
    """In exclusive mode, a GPU refuses a second process.

    The driver takes seconds to free the memory of a process.
    """
    arguments = ("--fresh-trainers", "--set", "gigabytes=60")
    host.run_ways(1, "none,none,none", *arguments, **{variable: "2"})
    assert [trial.state.name for trial in load_trials(host.folder / "run")] == ["COMPLETE"] * 3
    assert len(set(host.find_processes(0))) == 3


@pytest.mark.mpi
def test_run_starts_if_nvml_does_not_answer(host: GpuHost) -> None:
    host.run_ways(1, "none", FAKE_GPU_NO_NVML="1", CUDA_VISIBLE_DEVICES="MIG-2")
    (note,) = host.read_notes().values()
    assert note["uuid"] == "03"
    assert note["template"] not in {process for process, _ in host.read_events("cuInit")}


@pytest.mark.mpi
def test_run_is_refused_if_cuda_does_not_work(host: GpuHost) -> None:
    host.run(2, "--ranks-per-worker", 1, expected=2, FAKE_GPU_OLD_DRIVER="1")
    assert host.output.count("torch must be able to use the GPUs of each host. ") == 1
    assert "The NVIDIA driver on your system is too old" in host.output
    assert host.output.rstrip().endswith("To compute on CPUs: export CUDA_VISIBLE_DEVICES=")


@pytest.mark.mpi
def test_rank_that_sees_its_own_gpu_alone_is_local_rank_0(host: GpuHost) -> None:
    """As with srun --gpus-per-task=1."""
    search = [
        PROGRAM,
        SEARCH,
        "--run-dir",
        "run",
        "--set",
        f"folder={host.folder}",
        "--evaluations",
        1,
    ]
    first, second = (
        ["-n", 1, "-env", "CUDA_VISIBLE_DEVICES", gpu, sys.executable, *search] for gpu in (2, 3)
    )
    host.run_command(["mpirun", *first, ":", *second])
    notes = host.read_notes()
    assert [(one["uuid"], one["device"], one["local"]) for one in notes.values()] == [
        ("03", "cuda:0", "0"),
        ("04", "cuda:0", "0"),
    ]
    assert host.output.count("warning: ranks of one worker see different GPUs") == 1


@pytest.mark.mpi
def test_hang_in_the_start_of_nccl_is_limited_and_explained(host: GpuHost) -> None:
    change = "from hpo.evaluation import supervision\nsupervision.SECONDS_TO_JOIN = 3.0"
    program = write_changed_program(host.folder, change)
    host.run_ways(
        2, "none", "--collective-timeout", "2s", program=program, expected=3, FAKE_NCCL_HANG="1"
    )
    assert "NCCL or gloo does not answer. NCCL_DEBUG=INFO shows" in host.output
    assert len(host.read_events("ncclInitHangs")) == 4, "it is tried twice on both ranks"


@pytest.mark.mpi
def test_check_measures_memory_of_gpus_without_tf32(host: GpuHost) -> None:
    settings = ("--set", f"folder={host.folder}", "--set", "gigabytes=3")
    host.run_command(["mpirun", "-n", 2, *make_hpo_command("check", SEARCH, *settings)])
    assert not any(note["tf32"] for note in host.read_notes().values()), (
        "the losses of 1 and 2 ranks would differ"
    )
    assert re.search(r"2 ranks +50 +50 .* 31\d\d 31\d\d$", host.output, re.MULTILINE), host.output


BATCH_NORM = """
import os
import torch, torch.distributed as dist
from hpo.training.shared_layers import SharedBatchNorm
store, device = dist.HashStore(), torch.device("cuda", 0)
dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
for shape in [(4, 3, 2, 2), (4, 3)]:
    inputs = torch.ones(shape, device="cuda", requires_grad=True)
    memory_format = torch.channels_last if len(shape) == 4 else torch.preserve_format
    SharedBatchNorm(3).cuda()(inputs.to(memory_format=memory_format)).sum().backward()
    print(tuple(inputs.grad.shape), flush=True)
os._exit(0)  # torch's threads may abort the process at its exit.
"""


@pytest.mark.slow
def test_shared_batch_norm_has_gradients_on_gpus(host: GpuHost) -> None:
    assert host.run_python(BATCH_NORM) == "(4, 3, 2, 2)\n(4, 3)\n"


FORK_HAZARD = """
import os, torch
from hpo.trainer.template_server import find_fork_hazard
print(find_fork_hazard(), torch.cuda.device_count(), find_fork_hazard(), sep="|", flush=True)
if os.fork() == 0:
    print(torch.cuda._is_in_bad_fork(), flush=True)
    os._exit(0)
os.wait()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("has_nvml", "hazard"), [(True, ""), (False, "it asks the driver of the GPUs")]
)
def test_question_to_the_driver_is_a_fork_hazard(
    host: GpuHost, has_nvml: bool, hazard: str
) -> None:
    host.variables |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    host.variables |= {} if has_nvml else {"FAKE_GPU_NO_NVML": "1"}
    assert host.run_python(FORK_HAZARD) == f"|4|{hazard}\n{bool(hazard)}\n"


COLLECTIVE_CHECK = """
import os, torch, torch.distributed as dist
from datetime import timedelta
from hpo.process.messages import GroupTicket
from hpo.trainer.trainer_group import CollectiveCheck, TrainerGroup
trainer = TrainerGroup()
trainer.join(GroupTicket("", 0, 1, 0, "nccl", [0], "", ["", 0], 60.0, {}))
group, devices = dist.group.WORLD, [torch.device("cpu"), torch.device("cuda")]
def show():
    backends = [group._get_backend(device) for device in devices]
    for device in devices:
        dist.all_reduce(torch.ones(1, device=device))
    print(*[getattr(backend, "wrapped_pg", backend).name() for backend in backends], flush=True)
show()
check = CollectiveCheck(group, trainer.store, timedelta(seconds=60))
check.begin()
show()
check.end()
show()
os._exit(0)
"""


@pytest.mark.slow
def test_check_of_collectives_keeps_the_backend_of_each_device(host: GpuHost) -> None:
    before, during, after = host.run_python(COLLECTIVE_CHECK).splitlines()
    assert before == during == after
    assert before.split()[0] == "gloo"
    assert before.split()[1] != "gloo"
