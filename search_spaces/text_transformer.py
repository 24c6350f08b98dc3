"""A decoder-only transformer that predicts Python's standard library by character.

To minimise the loss and the number of parameters, add this line to the file:

    objectives = ("loss", "parameters")
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from hpo import Float, Int, Ordinal, SearchSpace, TextSample, Worker, training

space = SearchSpace(
    depth=Int(2, 6),
    width=Int(64, 192, step=32),
    heads=Ordinal(2, 3, 4, 6, 8),
    dropout=Float(0.0, 0.3, mutable=True),
    lr=Float(1e-4, 1e-2, log=True, mutable=True),
    warmup=Float(0.0, 0.3, mutable=True),
    weight_decay=Float(1e-3, 1.0, log=True, mutable=True),
)
space.require(lambda params: params["width"] % params["heads"] == 0, "heads must divide width")

PROMPTS = ("def ", "class ", "import ")


@dataclass(frozen=True)
class Settings(training.ParallelSettings):
    """Settings of this search. A user changes them with --set, for example --set context=64."""

    context: int = 64
    """Length of a sample in characters."""
    epochs: int = 3
    batch_size: int = 32
    """Samples of a training step, over all ranks."""
    patience: int = 0
    """Stop a training after this many epochs without a new lowest loss. 0 means never."""
    train_samples: int = 1024
    """Number of training samples. 0 means all, about 97,000. The default suits two cores."""
    validation_samples: int = 256
    """Number of validation samples. 0 means all, which are about 8,900 of 64 characters."""

    def __post_init__(self) -> None:
        super().__post_init__()
        training.check_positive(self, "context", "epochs", "batch_size")


def prepare(settings: Settings) -> training.TextDataset:
    """Load the text, once per host before the search. The result is `worker.data`."""
    return training.load_text(
        settings.context,
        train_samples=settings.train_samples,
        validation_samples=settings.validation_samples,
    )


def build_network(params: Mapping[str, Any], text: training.TextDataset) -> nn.Sequential:
    """Return a new network, a flat sequence of an embedding, blocks and a head."""
    sizes = {name: params[name] for name in ("depth", "width", "heads", "dropout")}
    return training.make_transformer(text.vocabulary_size, text.context, **sizes)


def share(network: nn.Sequential, worker: Worker, settings: Settings) -> Any:
    """Share the network among the ranks, as replicas, shards or pipeline stages."""
    if settings.parallel == "pipeline":
        return training.Pipeline(
            network, worker, settings.microbatches, precision=settings.precision
        )
    if settings.parallel == "replicate":
        return DistributedDataParallel(network.to(worker.device), gradient_as_bucket_view=True)
    mesh = training.make_mesh(worker)
    for block in network:
        fully_shard(block, mesh=mesh)
    return fully_shard(network, mesh=mesh)


def compute_losses(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of each sample, shape (N,)."""
    return cross_entropy(outputs.float().transpose(1, 2), targets, reduction="none").mean(1)


def resume(
    worker: Worker,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: training.SharedGradScaler,
    order: torch.Generator,
) -> tuple[list[float], int]:
    """Load the checkpoint of this evaluation or its parent. Return losses and steps."""
    checkpoint = worker.checkpoint  # This evaluation was interrupted.
    # With --pbt, it continues its parent's training.
    state = checkpoint or worker.parent_checkpoint
    if not state:
        return [], 0
    training.load_state(model, optimizer, state["model"])
    scaler.load_state_dict(state["scaler"])
    order.set_state(state["order"])
    return state["losses"] if checkpoint else [], state["step"]


def objective(
    params: dict[str, Any], worker: Worker, settings: Settings
) -> Iterator[tuple[float, dict[str, float]]]:
    """Train one network, and yield its loss in nats per character after each epoch."""
    train, validation = worker.data.splits(worker.device)
    network = build_network(params, worker.data)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    masks = training.DropoutMasks(worker.seed)
    training.replace_dropout(network, masks)  # Dropout does not depend on the number of ranks.
    model = share(network, worker, settings)
    is_pipeline = settings.parallel == "pipeline"
    groups = training.decay_weights(model, params["weight_decay"])
    optimizer = torch.optim.AdamW(groups, lr=params["lr"], fused=True)
    scaler = training.SharedGradScaler(worker.device, settings.precision)
    order = torch.Generator().manual_seed(worker.seed)  # The same order of samples on all ranks.
    losses, step = resume(worker, model, optimizer, scaler, order)

    def add_gradients(batch: Tensor) -> None:
        """Add the gradients of the mean loss of a batch, of which each rank has a share."""

        def compute_loss(outputs: Tensor, targets: Tensor) -> Tensor:
            return scaler.scale(compute_losses(outputs, targets).sum() / len(batch))

        for positions in training.split_batch(len(batch), worker, settings):
            inputs, targets = train.get_batch(batch[positions])
            if is_pipeline:
                model.backward(inputs, targets, positions, step, compute_loss)
                continue
            masks.begin_forward(step, positions, worker.device)
            with training.make_autocast(settings.precision, worker.device):
                outputs = model(inputs)
            # The mean over ranks is taken.
            (compute_loss(outputs, targets) * worker.size).backward()

    def measure(indices: Tensor) -> tuple[Tensor, Tensor]:
        inputs, targets = validation.get_batch(indices)
        with training.make_autocast(settings.precision, worker.device):
            outputs = model(inputs)
        return compute_losses(outputs, targets), (outputs.argmax(-1) == targets).float().mean(1)

    def make_state() -> dict[str, Any]:
        state = {"model": training.gather_state(model, optimizer), "scaler": scaler.state_dict()}
        return {**state, "order": order.get_state(), "step": step, "losses": losses}

    steps_per_epoch = math.ceil(len(train) / settings.batch_size)
    steps = settings.epochs * steps_per_epoch
    patience = settings.patience
    while len(losses) < settings.epochs and not training.should_stop_early(losses, patience):
        model.train()
        batches = torch.randperm(len(train), generator=order).split(settings.batch_size)
        for index, batch in enumerate(batches, len(losses) * steps_per_epoch):
            for group in optimizer.param_groups:
                group["lr"] = params["lr"] * training.compute_lr_factor(
                    index, steps, round(params["warmup"] * steps)
                )
            optimizer.zero_grad()
            add_gradients(batch)
            scaler.unscale_(optimizer)
            training.clip_gradients(model, 1.0)
            scaler.step(optimizer)
            scaler.update()
            step += 1

        model.eval()
        loss, accuracy = training.compute_means(
            measure, len(validation), worker, is_shared=not is_pipeline
        )
        losses.append(loss)
        worker.offer_weights(lambda: training.gather_weights(model))
        worker.save_checkpoint(make_state)
        yield loss, {"accuracy": accuracy, "parameters": parameters}


@torch.no_grad()
def test(
    params: dict[str, Any], weights: dict[str, Tensor], settings: Settings
) -> tuple[dict[str, float], list[TextSample]]:
    """Compute the test metrics of the best network, and generate texts, after the search."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    text = prepare(settings)
    network = build_network(params, text).to(device).eval()
    network.load_state_dict(weights)
    pieces = training.load_test_text(settings.context)
    # A small search is tested on equally few samples, from all files.
    if settings.validation_samples:
        count = min(settings.validation_samples, len(pieces))
        pieces = pieces[np.linspace(0, len(pieces) - 1, count).astype(int)]
    samples = training.TextOnDevice(pieces, device)
    sums = torch.zeros(2, dtype=torch.float64)
    for batch in torch.arange(len(samples)).split(256):
        inputs, targets = samples.get_batch(batch)
        outputs = network(inputs)
        right = (outputs.argmax(-1) == targets).float().mean(1)
        sums += torch.stack(
            [compute_losses(outputs, targets).double().sum(), right.double().sum()]
        ).cpu()
    loss, accuracy = (sums / len(samples)).tolist()
    # A network that has learned little generates more readable text below a temperature of 1.
    texts = [
        training.generate(network, text, prompt, 2 * text.context, 0.7, seed)
        for seed, prompt in enumerate(PROMPTS)
    ]
    return {"loss": loss, "accuracy": accuracy}, list(map(TextSample, PROMPTS, texts))
