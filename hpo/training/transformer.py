"""A decoder-only transformer, which can be cut into stages, and text generation."""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn

from hpo.training.text_data import TextDataset

_INIT_STD = 0.02


def make_transformer(
    vocabulary: int, context: int, depth: int, width: int, heads: int, dropout: float
) -> nn.Sequential:
    """Make an untrained transformer like GPT-2 (Radford et al. 2019), with pre-layer norms.

    It is a flat sequence of `embedding`, with learned positions, `block1` to `blockN`, and `head`.
    Initial weights have the distributions of GPT-2, and are drawn from torch's default generator.

    Args:
        vocabulary: Number of symbols.
        context: Largest number of symbols that the network reads.
        depth: Number of blocks.
        width: Size of the vectors between the blocks.
        heads: Number of attention heads; must divide `width`.
        dropout: Dropout probability, at least 0 and less than 1.

    Returns:
        A network from symbols, int64 of shape (N, length), to logits of the next symbol at each
        position, shape (N, length, vocabulary).

    Raises:
        ValueError: A size is less than 1, `heads` does not divide `width`, or `dropout` is out of
            range.

    Example:
        ::

            sizes = {"depth": 4, "width": 128, "heads": 4}
            network = make_transformer(vocabulary=97, context=128, dropout=0.1, **sizes)
            network(torch.zeros(64, 128, dtype=torch.int64))  # shape (64, 128, 97)
    """
    sizes = {"vocabulary": vocabulary, "context": context, "depth": depth, "width": width}
    for name, size in {**sizes, "heads": heads}.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if width % heads:
        raise ValueError(f"heads must divide width, which is {width}, got {heads}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and less than 1, got {dropout}")
    parts: dict[str, nn.Module] = {"embedding": TokenEmbedding(vocabulary, context, width, dropout)}
    for number in range(1, depth + 1):
        parts[f"block{number}"] = TransformerBlock(width, heads, dropout)
    parts["head"] = OutputHead(width, vocabulary)
    network = nn.Sequential(OrderedDict(parts))
    _initialise_weights(network, depth)
    return network


class TokenEmbedding(nn.Module):
    """Map symbols (N, length) to the sums of symbol and position embeddings."""

    def __init__(self, vocabulary: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.symbols = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        """Return the vectors. Raises ValueError if `length` exceeds the number of positions."""
        length = symbols.shape[1]
        context = self.positions.num_embeddings
        if length > context:
            raise ValueError(f"the number of symbols must be at most {context}, got {length}")
        positions = torch.arange(length, device=symbols.device)
        vectors: torch.Tensor = self.dropout(self.symbols(symbols) + self.positions(positions))
        return vectors


class TransformerBlock(nn.Module):
    """Causal attention and an MLP with residual connections, on (N, length, width)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = CausalSelfAttention(width, heads)
        self.dropout1 = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width)
        self.dropout2 = nn.Dropout(dropout)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return vectors of the same shape for the next block."""
        vectors = vectors + self.dropout1(self.attention(self.norm1(vectors)))
        added: torch.Tensor = self.dropout2(self.mlp(self.norm2(vectors)))
        return vectors + added


class CausalSelfAttention(nn.Module):
    """Causal self-attention with several heads (Vaswani et al. 2017)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(width, 3 * width)  # queries, keys and values
        self.output = nn.Linear(width, width)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return a weighted mean of positions up to each one, shape (N, length, width)."""
        apart = self.inputs(vectors).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        queries, keys, values = apart.unbind()  # (N, heads, length, width / heads) each
        means = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        output: torch.Tensor = self.output(means.transpose(1, 2).flatten(-2))
        return output


class MLP(nn.Module):
    """Two linear layers with four times the width between them, at each position."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(width, 4 * width)
        self.output = nn.Linear(4 * width, width)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return vectors of the same shape."""
        output: torch.Tensor = self.output(F.gelu(self.inputs(vectors)))
        return output


class OutputHead(nn.Module):
    """Map vectors (N, length, width) to logits (N, length, vocabulary)."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, vocabulary, bias=False)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        logits: torch.Tensor = self.logits(self.norm(vectors))
        return logits


def _initialise_weights(network: nn.Sequential, depth: int) -> None:
    for module in network.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=_INIT_STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    # This scale keeps the variance of the residual stream independent of the number of blocks.
    for block in network:
        if isinstance(block, TransformerBlock):
            for last in (block.attention.output, block.mlp.output):
                nn.init.normal_(last.weight, std=_INIT_STD / math.sqrt(2 * depth))


@torch.no_grad()
def generate(
    network: nn.Module,
    text: TextDataset,
    prompt: str,
    length: int,
    temperature: float = 1.0,
    seed: int = 0,
) -> str:
    """Generate characters after a prompt with a character language model.

    Args:
        network: A network from symbols, int64 of shape (1, length), to logits, shape (1, length,
            vocabulary), on any device. The network is switched to evaluation mode.
        text: The data set, for its symbols and its context. The network reads the last
            `text.context` characters.
        prompt: The text to continue. An empty prompt is replaced by a newline.
        length: Number of characters to generate.
        temperature: Divisor of the logits, greater than 0. Below 1, probable characters become more
            probable.
        seed: Seed of the draws. The same seed generates the same text.

    Returns:
        The generated characters, without the prompt.

    Raises:
        ValueError: `temperature` is not a finite number greater than 0, or `length` is negative.

    Example:
        ::

            generate(network, text, "def ", length=100, temperature=0.7)
    """
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be a finite number greater than 0, got {temperature}")
    if length < 0:
        raise ValueError(f"length must be at least 0, got {length}")
    network.eval()
    device = next(network.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    symbols = text.encode(prompt or "\n").tolist()
    start = len(symbols)
    for _ in range(length):
        window = torch.tensor([symbols[-text.context :]], device=device)
        logits = network(window)[0, -1].double().cpu()
        probabilities = torch.softmax(logits / temperature, dim=0)
        symbols.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return text.decode(symbols[start:])
