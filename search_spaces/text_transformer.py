"""A decoder-only transformer that predicts Python code by character. It is trained on the standard library.

To minimise the loss and the number of parameters, add this line to the file: objectives = ("loss", "parameters").
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from hpo import Float, Int, Ordinal, SearchSpace, TextSample, Worker
from hpo.training import (
    ParallelSettings,
    Recipe,
    TextDataset,
    check_positive,
    evaluate_language_model,
    fit,
    load_test_text,
    load_text,
    make_transformer,
)

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
class Settings(ParallelSettings):
    """Settings of this search. A user changes them with --set, for example --set context=64."""

    context: int = 64
    """Length of a sample in characters."""
    epochs: int = 3
    batch_size: int = 32
    """Size of the global batch, over all ranks."""
    patience: int = 0
    """Stop a training after this many epochs without a new lowest loss. 0 means never."""
    train_samples: int = 1024
    """Number of training samples. 0 means all, which are about 97,000 of 64 characters. The default suits two cores."""
    validation_samples: int = 256
    """Number of validation samples. 0 means all, which are about 8,900 of 64 characters."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "context", "epochs", "batch_size")


def prepare(settings: Settings) -> TextDataset:
    """Load the text. It is called once per host before the search, and its result is `worker.data`."""
    return load_text(
        settings.context, train_samples=settings.train_samples, validation_samples=settings.validation_samples
    )


def objective(params: dict[str, Any], worker: Worker, settings: Settings) -> Iterator[tuple[float, dict[str, float]]]:
    """Train one model, and yield its loss in nats per character and its number of parameters after each epoch."""
    recipe = Recipe(
        settings.epochs,
        settings.batch_size,
        params["lr"],
        optimizer="adamw",
        weight_decay=params["weight_decay"],
        schedule="cosine",
        warmup=params["warmup"],
        clip=1.0,
        patience=settings.patience,
    )
    network = network_of(params, worker.data)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    for loss, metrics in fit(network, worker.data, worker, recipe, settings):
        yield loss, {**metrics, "parameters": parameters}


def network_of(params: Mapping[str, Any], text: TextDataset) -> nn.Sequential:
    """Return a new network with the architecture that hyperparameters describe."""
    return make_transformer(
        text.vocabulary_size,
        text.context,
        depth=params["depth"],
        width=params["width"],
        heads=params["heads"],
        dropout=params["dropout"],
    )


def test(
    params: dict[str, Any], weights: Mapping[str, Tensor], settings: Settings
) -> tuple[dict[str, float], list[TextSample]]:
    """Compute the test metrics of the best model, and generate texts. It is called once, after the search."""
    text = prepare(settings)
    network = network_of(params, text)
    network.load_state_dict(dict(weights))
    pieces = load_test_text(settings.context)
    if settings.validation_samples:  # A small search is tested on equally few samples, from all files.
        some = min(settings.validation_samples, len(pieces))
        pieces = pieces[np.linspace(0, len(pieces) - 1, some).astype(int)]
    return evaluate_language_model(network, text, pieces, PROMPTS)
