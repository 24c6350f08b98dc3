"""How much of the machine a search gets: this program at 8 ranks beside bare training on the same cores.

    python benchmarks/throughput.py --data-dir /usr/share/datasets/fashion-mnist

(a) `mpirun -n 8 run_islands.py`, 4 workers of 2 ranks, on 16 networks of search_spaces/mnist_cnn.py that wait in its
study; (b) the same 16 trainings dealt to two single-rank processes: no MPI, no search, no communication, and the same
tricks. Both are timed from the first training's start to the last one's end, and repeated in turn, since machines are
noisy.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
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
# Deepest first, so that neither way ends with one long training while other cores idle.
LAYERS = [10, 10, 9, 9, 8, 8, 7, 7, 6, 6, 5, 5, 4, 4, 3, 2]
NETWORKS = list(zip(LAYERS, ["relu", "tanh", "sigmoid", "relu"] * 4, strict=True))
PROCESSES = 2


def main() -> None:
    """Print both rates and their ratio, run by run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", default="/usr/share/datasets/fashion-mnist", help="where Fashion-MNIST is")
    parser.add_argument("--repeat", type=int, default=3, help="how often both are run, in turn")
    parser.add_argument("--bare", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    settings = [*SETTINGS, f"data_dir={arguments.data_dir}"]
    if arguments.bare is not None:
        bare(arguments.bare, settings)
        return
    ratios = []
    for number in range(1, arguments.repeat + 1):
        search, limit = seconds_of_search(settings), seconds_of_bare(arguments.data_dir)
        ratios.append(limit / search)
        print(
            f"run {number}: (a) search {search:.1f} s, {60 * len(NETWORKS) / search:.0f} evaluations/min; "
            f"(b) bare {limit:.1f} s, {60 * len(NETWORKS) / limit:.0f} evaluations/min; ratio {ratios[-1]:.2f}",
            flush=True,
        )
    print(f"median ratio {statistics.median(ratios):.2f}")


def seconds_of_search(settings: list[str]) -> float:
    """Run a search on the networks, which wait in its study; return the seconds from first start to last end."""
    from hpo.layout import Layout
    from hpo.run.options import Options
    from hpo.run.request import resolve
    from hpo.run.session import begin, enter

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run")
        options = Options(SEARCH, evaluations=len(NETWORKS), run_dir=path, settings=tuple(settings))
        request = resolve(options, Layout(8, 2, 2))
        with ExitStack() as held:
            session = begin(enter(path, "", resume=False, held=held), request, hosts=["here"])
        record = session.open_record()
        networks = [{"conv_layers": layers, "activation": name, "lr": LR, "gamma": 0.9} for layers, name in NETWORKS]
        for network in networks:
            record.enqueue(network, request.problem.space.distributions())
        program = [str(ROOT / "run_islands.py"), str(SEARCH), "--resume", "--run-dir", str(path)]
        command = ["mpirun", "-n", "8", sys.executable, *program]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=300)
        evaluations = record.evaluations()
    assert [e.params for e in evaluations if e.state == "complete"] == networks, "not the networks that were asked for"
    return max(e.ended for e in evaluations) - min(e.started for e in evaluations)


def seconds_of_bare(data_dir: str) -> float:
    """Run two single-rank processes at once; return the seconds from the first start to the last end."""
    command = [sys.executable, __file__, "--data-dir", data_dir, "--bare"]
    processes = [
        subprocess.Popen([*command, str(part)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for part in range(PROCESSES)
    ]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()  # it is ready
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    times = [tuple(map(float, process.communicate(timeout=300)[0].split())) for process in processes]
    return max(end for _, end in times) - min(start for start, _ in times)


def bare(part: int, settings: list[str]) -> None:
    """Train every second network in this process alone, from the moment that all processes are ready."""
    import torch
    import torch.nn.functional as F
    from torch.optim import Adadelta

    from hpo.evaluation.host import keep_freed_memory
    from hpo.problem import load_search_file
    from hpo.training import Net

    torch.set_num_threads(1)
    keep_freed_memory()
    data = load_search_file(SEARCH).bound(settings).prepared()
    train, validation = data.on(torch.device("cpu"))
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.time()
    for layers, activation in NETWORKS[part::PROCESSES]:
        torch.manual_seed(0)
        net = Net(data.image_shape, data.classes, layers, activation)
        net.to(memory_format=torch.channels_last)
        optimizer = Adadelta(net.parameters(), lr=LR)
        for batch in torch.randperm(len(train)).view(-1, BATCH_SIZE):
            images, labels = train.batch(batch)
            optimizer.zero_grad()
            F.nll_loss(net(images), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        with torch.no_grad():
            for batch in torch.arange(len(validation)).split(256):  # type: ignore[no-untyped-call]
                images, labels = validation.batch(batch)
                F.nll_loss(net(images), labels).item()
    print(start, time.time())


if __name__ == "__main__":
    main()
