"""Compare the throughput of a search on 8 ranks with plain training on the same cores.

    python benchmarks/throughput.py --data-dir /usr/share/datasets/fashion-mnist
    python benchmarks/throughput.py --table

(a) is a search, `mpirun -n 8 run_islands.py`, with 4 workers of 2 ranks, over 16 enqueued networks
of search_spaces/mnist_cnn.py. (b) trains the same 16 networks in two processes, without MPI and
communication, with the same optimizations. Rounds of (a) and (b) alternate. A round is timed from
the start of the first training to the end of the last training. The times exclude imports.

`--table` explains the difference between (a) and (b). The first stage is (b). Each further stage
adds one more part of a search, such as the averaging of gradients. The script prints the CPU time
of each stage.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SEARCH = ROOT / "search_spaces" / "mnist_cnn.py"
BATCH_SIZE, LR = 64, 0.005
SETTINGS = [
    "dataset=fashion-mnist",
    "epochs=1",
    f"batch_size={BATCH_SIZE}",
    "train_samples=1600",
    "validation_samples=400",
]
# The deepest networks are first, so that no long training is the last one while other cores idle.
LAYERS = [10, 10, 9, 9, 8, 8, 7, 7, 6, 6, 5, 5, 4, 4, 3, 2]
NETWORKS = list(zip(LAYERS, ["relu", "tanh", "sigmoid", "relu"] * 4, strict=True))
PROCESSES = 2


@dataclass(frozen=True)
class Stage:
    """A variant of plain training, without a search.

    A training has `ranks` processes, which share each batch.
    """

    name: str
    processes: int
    ranks: int = 1
    optimizers: int = 1  # Number of ranks of a training that take optimizer steps.
    averages: bool = False  # Whether DistributedDataParallel averages gradients.


BARE = Stage("two processes, whole batches", PROCESSES)
STAGES = (
    BARE,
    Stage("eight processes: context switches, caches", 8),
    Stage("half batches", 8, ranks=2),
    Stage("the optimizer on each rank", 8, ranks=2, optimizers=2),
    Stage("gradient averaging by gloo", 8, ranks=2, optimizers=2, averages=True),
)


def main() -> None:
    """Print the rates of search and plain training and their ratio, or the table of stages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data-dir", default="/usr/share/datasets/fashion-mnist", help="folder of Fashion-MNIST"
    )
    parser.add_argument("--repeat", type=int, default=3, help="number of rounds")
    parser.add_argument("--table", action="store_true", help="print the CPU time of each stage")
    parser.add_argument(
        "--train", nargs=3, metavar=("STAGE", "PROCESS", "FOLDER"), help=argparse.SUPPRESS
    )
    arguments = parser.parse_args()
    settings = [*SETTINGS, f"data_dir={arguments.data_dir}"]
    if arguments.train:
        stage, process, folder = arguments.train
        train_share(STAGES[int(stage)], int(process), folder, settings)
    elif arguments.table:
        print_table(arguments.data_dir, settings, arguments.repeat)
    else:
        print_ratios(arguments.data_dir, settings, arguments.repeat)


def print_ratios(data_dir: str, settings: list[str], repeat: int) -> None:
    """Print the evaluations per minute of search and plain training, and the ratio, by round."""
    ratios = []
    for number in range(1, repeat + 1):
        search, limit = time_search(settings), time_stage(BARE, data_dir)[0]
        ratios.append(limit / search)
        print(
            f"run {number}: "
            f"(a) search {search:.1f} s, {60 * len(NETWORKS) / search:.0f} evaluations/min; "
            f"(b) bare {limit:.1f} s, {60 * len(NETWORKS) / limit:.0f} evaluations/min; "
            f"ratio {ratios[-1]:.2f}",
            flush=True,
        )
    print(f"median ratio {statistics.median(ratios):.2f}")


def print_table(data_dir: str, settings: list[str], repeat: int) -> None:
    """Print the CPU time of each stage, and the difference to the previous stage.

    The last row is the search: its duration times the number of cores, `PROCESSES`, which includes
    idle time.
    """
    rounds = []
    for _ in range(repeat):
        used = [time_stage(stage, data_dir)[1] for stage in STAGES]
        rounds.append([*used, PROCESSES * time_search(settings)])
    names = [*(stage.name for stage in STAGES), "the search, and idle cores"]
    seconds = [statistics.median(column) for column in zip(*rounds, strict=True)]
    print("CPU time, s   added")
    for name, time_used, before in zip(names, seconds, [0.0, *seconds], strict=False):
        print(f"{time_used:11.2f} {time_used - before:+7.2f}   {name}")


def time_search(settings: list[str]) -> float:
    """Run a search over the enqueued networks.

    Return the seconds from the first start to the last end of training.
    """
    from hpo.evaluation.host import Gpus, RankPlace
    from hpo.layout import Layout
    from hpo.options import Options
    from hpo.run.request import make_request
    from hpo.run.session import begin_session, enter_run_dir
    from tests.support.in_process_template import InProcessTemplate

    here = InProcessTemplate()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run")
        options = Options(SEARCH, evaluations=len(NETWORKS), run_dir=path, settings=tuple(settings))
        request = make_request(options, Layout(8, 2, 2), here.ask, here.constraints)
        with ExitStack() as held:
            session = begin_session(
                enter_run_dir(path, "", resume=False, resources=held),
                request,
                [RankPlace(0, "here", Gpus())] * 8,
            )
        record = session.open_record()
        networks = [
            {"conv_layers": layers, "activation": name, "lr": LR, "gamma": 0.9}
            for layers, name in NETWORKS
        ]
        for network in networks:
            record.enqueue(network, request.problem.space.make_distributions())
        program = [str(ROOT / "run_islands.py"), str(SEARCH), "--resume", "--run-dir", str(path)]
        command = ["mpirun", "-n", "8", sys.executable, *program]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=300)
        evaluations = record.read_evaluations()
    assert [e.params for e in evaluations if e.state == "complete"] == networks, (
        "not the enqueued networks"
    )
    return max(e.ended for e in evaluations) - min(e.started for e in evaluations)


def time_stage(stage: Stage, data_dir: str) -> tuple[float, float]:
    """Run the processes of a stage.

    Return the seconds from the first start to the last end, and the CPU seconds.
    """
    command = [
        sys.executable,
        __file__,
        "--data-dir",
        data_dir,
        "--train",
        str(STAGES.index(stage)),
    ]
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [*command, str(number), folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(stage.processes)
        ]
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()  # The process is ready.
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        times = [
            tuple(map(float, process.communicate(timeout=300)[0].split())) for process in processes
        ]
    return max(end for _, end, _ in times) - min(start for start, _, _ in times), sum(
        used for _, _, used in times
    )


def train_share(stage: Stage, process: int, folder: str, settings: list[str]) -> None:
    """Wait until all processes are ready. Then train the networks of process number `process`."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.optim import Adadelta

    from hpo.trainer.search_file import load_search_file
    from hpo.trainer.template_server import import_compiler, keep_freed_memory
    from search_spaces.mnist_cnn import Net

    training, rank = divmod(process, stage.ranks)
    torch.set_num_threads(1)
    keep_freed_memory()
    import_compiler()  # A template does this before it forks trainers.
    data = load_search_file(SEARCH).bind_settings(settings).call_prepare()
    train, validation = data.splits(torch.device("cpu"))
    if stage.averages:
        store = dist.FileStore(f"{folder}/{training}", stage.ranks)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=stage.ranks)
    print("ready", flush=True)
    sys.stdin.readline()
    start, used = time.time(), time.process_time()
    for layers, activation in NETWORKS[training :: stage.processes // stage.ranks]:
        torch.manual_seed(0)
        net = Net(layers, activation)
        net.to(memory_format=torch.channels_last)
        trained: nn.Module = (
            DistributedDataParallel(net, gradient_as_bucket_view=True) if stage.averages else net
        )
        optimizer = Adadelta(net.parameters(), lr=LR, foreach=True)
        for batch in torch.randperm(len(train)).view(-1, BATCH_SIZE):
            images, labels = train.get_batch(batch[rank :: stage.ranks])
            optimizer.zero_grad()
            F.nll_loss(trained(images), labels).backward()  # type: ignore[no-untyped-call]
            if rank < stage.optimizers:
                optimizer.step()
        with torch.no_grad():
            for batch in torch.arange(len(validation)).split(256):  # type: ignore[no-untyped-call]
                images, labels = validation.get_batch(batch[rank :: stage.ranks])
                F.nll_loss(net(images), labels).item()
    print(start, time.time(), time.process_time() - used)


if __name__ == "__main__":
    main()
