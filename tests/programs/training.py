"""Train the same networks on workers of 1, 2 and 3 ranks, and by a plain loop. Each rank prints a line of JSON."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

from hpo.trainer.worker import Worker
from hpo.training import ImageDataset, LabelledImages, Net, Recipe, fit, load_data
from tests.programs.ranks import run_ranks
from tests.programs.tell import tell

# Nothing divides by 2 or 3. 193 samples in batches of 32 leave one of a single sample: an empty share on most ranks.
EPOCHS, BATCH, TRAIN, VALIDATION, SEED, LR, GAMMA = 3, 32, 193, 101, 7, 0.3, 0.8

data = load_data("digits", train_samples=TRAIN, validation_samples=VALIDATION)


def net() -> Net:
    torch.manual_seed(SEED)
    return Net(data.image_shape, data.num_classes, conv_layers=3, activation="tanh")


def normalised(split: LabelledImages) -> torch.Tensor:
    images = torch.from_numpy(split.images).float()
    return (images - torch.from_numpy(data.mean).view(-1, 1, 1)) / torch.from_numpy(data.std).view(-1, 1, 1)


def by_the_book(data: ImageDataset) -> list[float]:
    """Train in this process alone, with a plain loop, and return the validation losses."""
    model = net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=LR)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=GAMMA)
    shuffle = torch.Generator().manual_seed(SEED)
    images, labels = normalised(data.train), torch.from_numpy(data.train.labels)
    losses = []
    for _epoch in range(EPOCHS):
        for batch in torch.randperm(TRAIN, generator=shuffle).split(BATCH):
            optimizer.zero_grad()
            F.nll_loss(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        scheduler.step()
        with torch.no_grad():
            output = model(normalised(data.validation))
            losses.append(F.nll_loss(output, torch.from_numpy(data.validation.labels)).item())
    return losses


def train(first: int, worker: Worker) -> None:
    """Train as one rank of a worker, and print the results.

    Args:
        first: Number of the worker's first rank, counted over all workers.
        worker: The worker.
    """
    total = torch.tensor([float(first + worker.rank)])
    dist.all_reduce(total)
    runs = []
    for _run in range(2):
        network = net()
        recipe = Recipe(EPOCHS, BATCH, LR, optimizer="adadelta", schedule="step", gamma=GAMMA)
        steps = fit(network, data, worker, recipe)
        runs.append(list(steps))
    with torch.no_grad():
        output = network(normalised(data.validation))
    labels = torch.from_numpy(data.validation.labels)
    still = list(fit(net(), data, worker, Recipe(epochs=20, batch_size=BATCH, lr=0.0, patience=4)))
    tell(
        rank=first + worker.rank,
        size=worker.size,
        group=[dist.get_world_size(), dist.get_rank(), dist.get_backend(), total.item()],
        losses=[loss for loss, _metrics in runs[0]],
        again=[loss for loss, _metrics in runs[1]],
        accuracy=runs[0][-1][1]["accuracy"],
        own_loss=F.nll_loss(output, labels).item(),
        own_accuracy=(output.argmax(1) == labels).float().mean().item(),
        epochs_without_progress=len(still),
        by_the_book=worker.comm.bcast(by_the_book(data) if worker.rank == 0 else None),
    )


for first, size in ((0, 1), (1, 2), (3, 3)):
    run_ranks(size, partial(train, first), SEED)
