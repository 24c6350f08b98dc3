"""Train networks of digits_cnn on workers of 1, 2 and 3 ranks, and by a plain loop.

Each rank prints a line of JSON.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from hpo.trainer.offers import Offers
from hpo.trainer.worker import Worker
from search_spaces.digits_cnn import Net, Settings, objective, prepare
from tests.programs.ranks import run_ranks
from tests.programs.tell import tell

# Nothing divides by 2 or 3. 193 samples in batches of 32 leave one of a single sample: an empty
# share on most ranks.
EPOCHS, BATCH, TRAIN, VALIDATION, SEED = 3, 32, 193, 101, 7
PARAMS: dict[str, Any] = {"conv_layers": 3, "activation": "tanh", "lr": 0.3, "gamma": 0.8}
SETTINGS = Settings(EPOCHS, BATCH)

parts = {"train": TRAIN, "validation": VALIDATION}
data = {
    part: tuple(tensor[: parts[part]] for tensor in tensors)
    for part, tensors in prepare(SETTINGS).items()
}


def by_the_book() -> list[float]:
    """Train in this process alone, with a plain loop, and return the validation losses."""
    torch.manual_seed(SEED)
    model = Net(PARAMS["conv_layers"], PARAMS["activation"])
    optimizer = torch.optim.Adadelta(model.parameters(), lr=PARAMS["lr"])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=PARAMS["gamma"])
    shuffle = torch.Generator().manual_seed(SEED)
    images, labels = data["train"]
    losses = []
    for _epoch in range(EPOCHS):
        for batch in torch.randperm(TRAIN, generator=shuffle).split(BATCH):
            optimizer.zero_grad()
            F.nll_loss(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        scheduler.step()
        losses.append(validate(model)[0])
    return losses


@torch.no_grad()
def validate(network: Net) -> tuple[float, float]:
    images, labels = data["validation"]
    output = network(images)
    return F.nll_loss(output, labels).item(), (output.argmax(1) == labels).float().mean().item()


def train(first: int, worker: Worker) -> None:
    """Train as one rank of a worker, and print the results.

    Args:
        first: Number of the worker's first rank, counted over all workers.
        worker: The worker.
    """
    total = torch.tensor([float(first + worker.rank)])
    dist.all_reduce(total)
    network = Net(PARAMS["conv_layers"], PARAMS["activation"])

    class KeptWeights(Offers):
        def offer_weights(self, weights):
            network.load_state_dict(weights)

    worker = replace(worker, _offers=KeptWeights())
    worker.data = data

    def run(settings: Settings, **params: float) -> list[tuple[float, dict[str, float]]]:
        torch.manual_seed(SEED)
        return list(objective({**PARAMS, **params}, worker, settings))

    runs = [run(SETTINGS), run(SETTINGS)]
    own_loss, own_accuracy = validate(network)
    still = run(Settings(epochs=20, batch_size=BATCH, patience=4), lr=0.0)
    tell(
        rank=first + worker.rank,
        size=worker.size,
        group=[dist.get_world_size(), dist.get_rank(), dist.get_backend(), total.item()],
        losses=[loss for loss, _metrics in runs[0]],
        again=[loss for loss, _metrics in runs[1]],
        accuracy=runs[0][-1][1]["accuracy"],
        own_loss=own_loss,
        own_accuracy=own_accuracy,
        epochs_without_progress=len(still),
        by_the_book=worker.comm.bcast(by_the_book() if worker.rank == 0 else None),
    )


for first, size in ((0, 1), (1, 2), (3, 3)):
    run_ranks(size, partial(train, first), SEED)
