"""Test the transformer: its parts, weights, training, attention and texts."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hpo.training.text_data import TextDataset, load_text
from hpo.training.transformer import TransformerBlock, generate, make_transformer

CONTEXT = 32


@pytest.fixture(scope="module")
def text() -> TextDataset:
    return load_text(CONTEXT, train_samples=2000, validation_samples=200)


def small(dropout: float = 0.0, **changes: int) -> nn.Sequential:
    torch.manual_seed(0)
    sizes = {"vocabulary": 97, "context": CONTEXT, "depth": 2, "width": 32, "heads": 4, **changes}
    return make_transformer(**sizes, dropout=dropout)


def test_transformer_is_a_flat_sequence() -> None:
    network = small(depth=3)
    assert list(dict(network.named_children())) == [
        "embedding",
        "block1",
        "block2",
        "block3",
        "head",
    ]
    width, vocabulary = 32, 97
    # Four matrices of attention, eight of the MLP, their biases, two norms.
    block = 12 * width**2 + 13 * width
    expected = (vocabulary + CONTEXT) * width + 3 * block + 2 * width + width * vocabulary
    assert sum(parameter.numel() for parameter in network.parameters()) == expected
    assert network.get_parameter("head.logits.weight") is not network.get_parameter(
        "embedding.symbols.weight"
    )
    assert network(torch.zeros(5, 7, dtype=torch.int64)).shape == (5, 7, 97)


def test_transformer_slices_are_stages() -> None:
    network, symbols = small(), torch.randint(97, (3, CONTEXT))
    first, second = network[:2], network[2:]
    assert set(first.state_dict()) | set(second.state_dict()) == set(network.state_dict())
    assert torch.allclose(second(first(symbols)), network(symbols), atol=1e-6)


def test_transformer_positions_depend_only_on_earlier_ones() -> None:
    network = small().eval()
    before, after = torch.randint(97, (1, CONTEXT)), torch.randint(97, (1, CONTEXT))
    other = torch.cat([before[:, :10], after[:, 10:]], dim=1)
    one, two = network(before), network(other)
    assert torch.allclose(one[:, :10], two[:, :10], atol=1e-6)
    assert not torch.isclose(one[0, 10:], two[0, 10:]).all(dim=1).any()
    swapped = before[:, [1, 0, *range(2, CONTEXT)]]
    assert not torch.allclose(network(swapped)[0, -1], one[0, -1]), "places have positions"


def test_transformer_weights_follow_gpt_2_and_the_seed() -> None:
    network = small(depth=8, width=64)
    again = small(depth=8, width=64)
    assert all(
        torch.equal(one, other)
        for one, other in zip(network.parameters(), again.parameters(), strict=True)
    )
    blocks = [module for module in network if isinstance(module, TransformerBlock)]
    assert len(blocks) == 8
    for block in blocks:
        for weight in (block.attention.inputs.weight, block.mlp.inputs.weight):
            assert weight.std().item() == pytest.approx(0.02, rel=0.1)
        for weight in (block.attention.output.weight, block.mlp.output.weight):
            assert weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.1)
        assert not block.mlp.output.bias.any()
    for name in ("embedding.symbols", "embedding.positions", "head.logits"):
        assert network.get_parameter(f"{name}.weight").std().item() == pytest.approx(0.02, rel=0.1)


def test_transformer_dropout_is_only_active_in_training() -> None:
    network, symbols = small(dropout=0.5), torch.randint(97, (2, CONTEXT))
    places = [name for name, module in network.named_modules() if isinstance(module, nn.Dropout)]
    assert places == [
        "embedding.dropout",
        *(f"block{n}.dropout{place}" for n in (1, 2) for place in (1, 2)),
    ]
    assert not torch.allclose(network(symbols), network(symbols))
    network.eval()
    assert torch.allclose(network(symbols), network(symbols), atol=1e-6)
    assert torch.allclose(network(symbols), small().eval()(symbols), atol=1e-6)


@pytest.mark.slow
def test_transformer_learns_the_standard_library(text: TextDataset) -> None:
    network = small(depth=1)
    train, validation = text.splits(torch.device("cpu"))
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(network(inputs).flatten(0, 1), targets.flatten())

    validate = validation.get_batch(torch.arange(len(validation)))
    untrained = loss(*validate).item()
    assert untrained == pytest.approx(math.log(97), abs=0.1), "a guess"
    for batch in torch.arange(len(train)).split(20):  # type: ignore[no-untyped-call]
        optimizer.zero_grad()
        loss(*train.get_batch(batch)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    # The characters' frequencies alone give 3.2.
    assert loss(*validate).item() < 2.9


class Knows(nn.Module):
    """A network that predicts the next symbol of the vocabulary with certainty.

    `shown` lists the symbols that it has received.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sharpness = nn.Parameter(torch.tensor(20.0))
        self.shown: list[list[int]] = []

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        self.shown.append(symbols[0].tolist())
        return self.sharpness * F.one_hot((symbols + 1) % 97, 97)


def test_generate_continues_the_prompt_within_the_context(text: TextDataset) -> None:
    network = Knows()
    assert generate(network, text, "0123", 40) == "".join(map(chr, range(ord("4"), ord("4") + 40)))
    lengths = [len(shown) for shown in network.shown]
    assert lengths == [*range(4, CONTEXT), *[CONTEXT] * (40 - CONTEXT + 4)]
    assert text.decode(network.shown[-1])[-1] == chr(ord("4") + 38)
    assert generate(network, text, "", 2) == " !", "as if on a new line"
    assert generate(network, text, "a" * 1000, 1) == "b"
    assert generate(network, text, "a", 0) == ""


def test_generate_depends_on_seed_and_temperature(text: TextDataset) -> None:
    network = small(dropout=0.5)
    first = generate(network, text, "def ", 60, seed=1)
    assert len(first) == 60
    torch.manual_seed(7)
    assert generate(network, text, "def ", 60, seed=1) == first, (
        "without dropout, and whatever torch's seed"
    )
    assert generate(network, text, "def ", 60, seed=2) != first
    cold = [generate(network, text, "def ", 30, temperature=1e-6, seed=seed) for seed in (1, 2)]
    assert cold[0] == cold[1], "nothing but the likeliest"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 0}, "depth must be at least 1, got 0"),
        ({"heads": 0}, "heads must be at least 1, got 0"),
        ({"context": -1}, "context must be at least 1, got -1"),
        ({"heads": 5}, "heads must divide width, which is 32, got 5"),
        ({"dropout": 1.0}, "dropout must be at least 0 and less than 1, got 1.0"),
        ({"dropout": float("nan")}, "dropout must be at least 0 and less than 1, got nan"),
    ],
)
def test_transformer_with_wrong_arguments_raises(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**changes)


def test_generate_with_wrong_arguments_raises(text: TextDataset) -> None:
    with pytest.raises(ValueError, match="the number of symbols must be at most 32, got 33"):
        small()(torch.zeros(1, 33, dtype=torch.int64))
    for temperature in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(
            ValueError,
            match=f"temperature must be a finite number greater than 0, got {temperature}",
        ):
            generate(small(), text, "", 1, temperature)
    with pytest.raises(ValueError, match="length must be at least 0, got -1"):
        generate(small(), text, "", -1)
