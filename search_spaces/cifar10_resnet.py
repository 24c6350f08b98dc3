"""ResNet-18 on CIFAR-10, Fashion-MNIST or handwritten digits. The last two take less time."""

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, StepLR

from hpo import Categorical, Float, Prediction, SearchSpace, Worker, training

space = SearchSpace(
    optimizer=Categorical("sgd", "adamw"),
    lr=Float(1e-2, 1.0, log=True, mutable=True, when={"optimizer": "sgd"}),
    momentum=Float(0.5, 0.99, mutable=True, when={"optimizer": "sgd"}),
    weight_decay=Float(1e-5, 1e-2, log=True, mutable=True, when={"optimizer": "sgd"}),
    adamw_lr=Float(1e-4, 1e-2, log=True, mutable=True, when={"optimizer": "adamw"}),
    adamw_decay=Float(1e-3, 1.0, log=True, mutable=True, when={"optimizer": "adamw"}),
    label_smoothing=Float(0.0, 0.2, mutable=True),
    augmentation=Categorical("none", "crop", "crop-and-flip"),
    schedule=Categorical("step", "cosine", "one-cycle"),
)

# Costs of the blocks for pipeline stages. Numbers of parameters are a poor estimate: layer4 has
# most of them.
COSTS = {f"layer{layer}.{block}": 1.0 for layer in range(1, 5) for block in range(2)}


@dataclass(frozen=True)
class Settings(training.ParallelSettings):
    """Settings of this search. Set them with --set, for example --set dataset=fashion-mnist."""

    dataset: str = "cifar10"
    """Name of the data set, which is cifar10, fashion-mnist or digits."""
    data_dir: str = "data"
    """Folder of the files, which are downloaded if they are missing. Not used for digits."""
    epochs: int = 30
    batch_size: int = 128
    """Samples of a training step, over all ranks."""
    patience: int = 0
    """Stop a training after this many epochs without a new lowest loss. 0 means never."""
    train_samples: int = 0
    """Number of training samples. 0 means all, which are 40,000 of CIFAR-10."""
    validation_samples: int = 0
    """Number of validation samples. 0 means all, which are 10,000 of CIFAR-10."""

    def __post_init__(self) -> None:
        super().__post_init__()
        training.check_choice("dataset", self.dataset, ("cifar10", "fashion-mnist", "digits"))
        training.check_positive(self, "epochs", "batch_size")


def prepare(settings: Settings) -> training.ImageDataset:
    """Load the data, once per host before the search. The result is `worker.data`."""
    return training.load_data(
        settings.dataset,
        settings.data_dir,
        train_samples=settings.train_samples,
        validation_samples=settings.validation_samples,
    )


def build_network(data: training.ImageDataset) -> nn.Sequential:
    """Return torchvision's ResNet-18 (He et al. 2016), untrained, as a sequence.

    As usual for CIFAR-10, the first convolution is 3x3 with stride 1, and no pooling follows.
    """
    from torchvision.models import resnet18

    network = resnet18(num_classes=data.num_classes)
    network.conv1 = nn.Conv2d(data.image_shape[0], 64, kernel_size=3, padding=1, bias=False)
    # Torchvision does the same.
    nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
    parts = OrderedDict(network.named_children())
    del parts["maxpool"]
    fc = parts.pop("fc")
    return nn.Sequential(OrderedDict([*parts.items(), ("flatten", nn.Flatten()), ("fc", fc)]))


def share(network: nn.Sequential, worker: Worker, settings: Settings) -> Any:
    """Share the network among the ranks, as replicas, shards or pipeline stages."""
    if settings.parallel == "pipeline":
        return training.Pipeline(
            network,
            worker,
            settings.microbatches,
            precision=settings.precision,
            stage_costs=COSTS,
        )
    training.replace_batch_norm(network)  # Each normalises the samples of all ranks.
    if settings.parallel == "replicate":
        network.to(worker.device).to(memory_format=torch.channels_last)  # Convolutions are faster.
        model = DistributedDataParallel(network, gradient_as_bucket_view=True)
        model.broadcast_buffers = False  # They are equal on all ranks.
        return model
    mesh = training.make_mesh(worker)
    for _, block in training.list_blocks(network):
        if list(block.parameters()):
            fully_shard(block, mesh=mesh)
    return fully_shard(network, mesh=mesh)


def make_optimizer(model: nn.Module, params: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Make an optimizer that does not decay biases and the weights of norms."""
    if params["optimizer"] == "sgd":
        groups = training.decay_weights(model, params["weight_decay"])
        momentum = params["momentum"]
        return torch.optim.SGD(groups, lr=params["lr"], momentum=momentum, nesterov=True)
    groups = training.decay_weights(model, params["adamw_decay"])
    return torch.optim.AdamW(groups, lr=params["adamw_lr"], fused=True)


def make_schedule(
    optimizer: torch.optim.Optimizer, schedule: str, epochs: int, steps_per_epoch: int
) -> LRScheduler:
    """Make a schedule of the learning rate, of which each training step is a step."""
    steps = epochs * steps_per_epoch
    if schedule == "step":
        return StepLR(optimizer, steps_per_epoch, 0.01 ** (1 / epochs))  # It ends at 1% of lr.
    if schedule == "one-cycle":
        return OneCycleLR(
            optimizer, optimizer.defaults["lr"], steps, pct_start=0.3, cycle_momentum=False
        )
    return LambdaLR(
        optimizer, partial(training.compute_lr_factor, steps=steps, warmup=round(0.05 * steps))
    )


def resume(
    worker: Worker,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: training.SharedGradScaler,
    schedule: LRScheduler,
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
    if not checkpoint:
        return [], state["step"]
    schedule.load_state_dict(checkpoint["schedule"])
    for group, lr in zip(optimizer.param_groups, schedule.get_last_lr(), strict=True):
        group["lr"] = lr
    return checkpoint["losses"], checkpoint["step"]


def objective(
    params: dict[str, Any], worker: Worker, settings: Settings
) -> Iterator[tuple[float, dict[str, float]]]:
    """Train one network, and yield its validation loss and accuracy after each epoch."""
    train, validation = worker.data.splits(worker.device)
    model = share(build_network(worker.data), worker, settings)
    is_pipeline = settings.parallel == "pipeline"
    optimizer = make_optimizer(model, params)
    schedule = make_schedule(
        optimizer, params["schedule"], settings.epochs, math.ceil(len(train) / settings.batch_size)
    )
    scaler = training.SharedGradScaler(worker.device, settings.precision)
    order = torch.Generator().manual_seed(worker.seed)  # The same order of samples on all ranks.
    losses, step = resume(worker, model, optimizer, scaler, schedule, order)

    def add_gradients(batch: Tensor) -> None:
        """Add the gradients of the mean loss of a batch, of which each rank has a share."""
        drawn = torch.zeros(len(batch), 0)
        if params["augmentation"] != "none":
            drawn = torch.rand(len(batch), 3, generator=order)

        def compute_loss(outputs: Tensor, labels: Tensor) -> Tensor:
            smoothing = params["label_smoothing"]
            losses = cross_entropy(
                outputs.float(), labels, reduction="none", label_smoothing=smoothing
            )
            return scaler.scale(losses.sum() / len(batch))

        for positions in training.split_batch(len(batch), worker, settings):
            images, labels = train.get_batch(batch[positions])
            images = training.augment_images(images, drawn[positions], params["augmentation"])
            if is_pipeline:
                model.backward(images, labels, positions, step, compute_loss)
                continue
            with training.make_autocast(settings.precision, worker.device):
                outputs = model(images)
            # The mean over ranks is taken.
            (compute_loss(outputs, labels) * worker.size).backward()

    def measure(indices: Tensor) -> tuple[Tensor, Tensor]:
        images, labels = validation.get_batch(indices)
        with training.make_autocast(settings.precision, worker.device):
            outputs = model(images)
        return cross_entropy(outputs.float(), labels, reduction="none"), outputs.argmax(1) == labels

    def make_state() -> dict[str, Any]:
        state = {"model": training.gather_state(model, optimizer), "scaler": scaler.state_dict()}
        state["schedule"] = schedule.state_dict()
        return {**state, "order": order.get_state(), "step": step, "losses": losses}

    patience = settings.patience
    while len(losses) < settings.epochs and not training.should_stop_early(losses, patience):
        model.train()
        for batch in torch.randperm(len(train), generator=order).split(settings.batch_size):
            optimizer.zero_grad()
            add_gradients(batch)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            step += 1

        model.eval()
        loss, accuracy = training.compute_means(
            measure, len(validation), worker, is_shared=not is_pipeline
        )
        losses.append(loss)
        worker.offer_weights(lambda: training.gather_weights(model))
        worker.save_checkpoint(make_state)
        yield loss, {"accuracy": accuracy}


@torch.no_grad()
def test(
    params: dict[str, Any],  # noqa: ARG001 - the network does not depend on hyperparameters
    weights: dict[str, Tensor],
    settings: Settings,
) -> tuple[dict[str, float], list[Prediction]]:
    """Compute the test metrics of the best network. It is called once, after the search."""
    data = prepare(settings)  # Test images are normalised as in training.
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    network = build_network(data).to(device).eval()
    network.load_state_dict(weights)
    pictures = training.load_test_data(settings.dataset, settings.data_dir)
    # A small search is tested on equally few images.
    count = min(settings.validation_samples or len(pictures), len(pictures))
    images, labels = training.ImagesOnDevice(pictures, data, device).get_batch(torch.arange(count))
    outputs = torch.cat([network(batch) for batch in images.split(256)]).log_softmax(1)
    metrics = {
        "loss": nn.functional.nll_loss(outputs, labels).item(),
        "accuracy": (outputs.argmax(1) == labels).double().mean().item(),
    }
    return metrics, training.select_predictions(
        torch.from_numpy(pictures.images), outputs.exp(), labels, data.class_names
    )
