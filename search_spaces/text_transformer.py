"""A decoder-only transformer that learns to write Python, character by character, from Python's standard library.

What it has learned is weighed against its size by one more line: objectives = ("loss", "parameters").
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
    """Options of this search: --set context=64."""

    context: int = 64
    """How many characters the network reads to predict the next one; each sample is a piece of this length."""
    epochs: int = 3
    batch_size: int = 32
    """The global batch, which the ranks share."""
    patience: int = 0
    """How many epochs in a row without a new best loss end a training; 0: none do"""
    train_samples: int = 1024
    """What two cores can do; 0: all, about 97,000 pieces of 64 characters"""
    validation_samples: int = 256
    """0: all, about 8,900 pieces of 64 characters"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "context", "epochs", "batch_size")


def prepare(settings: Settings) -> TextDataset:
    """Load the text, once per host and before anything starts; the objective finds it as `worker.data`."""
    return load_text(
        settings.context, train_samples=settings.train_samples, validation_samples=settings.validation_samples
    )


def objective(params: dict[str, Any], worker: Worker, settings: Settings) -> Iterator[tuple[float, dict[str, float]]]:
    """Train one network on the worker's ranks; yield its loss, in nats per character, and its size after each epoch."""
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
    """Return the network of an individual."""
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
    """Judge the best network by files that the search has not seen, and let it write; called once, at the end."""
    text = prepare(settings)
    network = network_of(params, text)
    network.load_state_dict(dict(weights))
    pieces = load_test_text(settings.context)
    if settings.validation_samples:  # a search that is kept small is tested with as many, from all files
        some = min(settings.validation_samples, len(pieces))
        pieces = pieces[np.linspace(0, len(pieces) - 1, some).astype(int)]
    return evaluate_language_model(network, text, pieces, PROMPTS)
