"""A decoder-only transformer for texts, in parts that can be sharded or cut into pipeline stages, and how it writes."""

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
    """Return a transformer as GPT-2 is one (Radford et al. 2019), with layer norms before attention and MLP.

    It is a flat sequence: `embedding`, with learnt positions; `depth` blocks, `block1` and so on; `head`. It takes
    symbols, int64 of shape (N, up to `context`), and returns logits of the next one at each place, shape (N, length,
    vocabulary). Weights are drawn as GPT-2's are, by torch's default generator.

    Raises ValueError for a size below 1, heads that do not divide the width, or a dropout that is no probability below
    1.

    ::

        network = transformer(vocabulary=97, context=128, depth=4, width=128, heads=4, dropout=0.1)
        network(torch.zeros(64, 128, dtype=torch.int64))  # shape (64, 128, 97)
    """
    sizes = {"vocabulary": vocabulary, "context": context, "depth": depth, "width": width, "heads": heads}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, not {size}")
    if width % heads:
        raise ValueError(f"heads must divide width, which is {width}: {heads} does not")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and less than 1, not {dropout}")
    parts: dict[str, nn.Module] = {"embedding": TokenEmbedding(vocabulary, context, width, dropout)}
    parts |= {f"block{place + 1}": TransformerBlock(width, heads, dropout) for place in range(depth)}
    parts["head"] = OutputHead(width, vocabulary)
    network = nn.Sequential(OrderedDict(parts))
    _initialise_weights(network, depth)
    return network


class TokenEmbedding(nn.Module):
    """Symbols (N, length) to vectors (N, length, width), each the sum of its symbol's and its place's."""

    def __init__(self, vocabulary: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.symbols = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        """Return the vectors; raises ValueError for more symbols than there are positions."""
        length, context = symbols.shape[1], self.positions.num_embeddings
        if length > context:
            raise ValueError(f"the network reads {context} symbols, and was given {length}")
        places = torch.arange(length, device=symbols.device)
        vectors: torch.Tensor = self.dropout(self.symbols(symbols) + self.positions(places))
        return vectors


class TransformerBlock(nn.Module):
    """Attention to what came before and an MLP, each added to what it was given, of shape (N, length, width)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = CausalSelfAttention(width, heads)
        self.dropout1 = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width)
        self.dropout2 = nn.Dropout(dropout)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return the vectors that the next block is given."""
        vectors = vectors + self.dropout1(self.attention(self.norm1(vectors)))
        added: torch.Tensor = self.dropout2(self.mlp(self.norm2(vectors)))
        return vectors + added


class CausalSelfAttention(nn.Module):
    """Causal self attention with several heads (Vaswani et al. 2017)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(width, 3 * width)  # queries, keys and values
        self.output = nn.Linear(width, width)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return, of each place, a mean of the places up to it, shape (N, length, width)."""
        apart = self.inputs(vectors).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        queries, keys, values = apart.unbind()  # (N, heads, length, width / heads) each
        means = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        output: torch.Tensor = self.output(means.transpose(1, 2).flatten(-2))
        return output


class MLP(nn.Module):
    """Two layers, of four times the width between them, for each place by itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(width, 4 * width)
        self.output = nn.Linear(4 * width, width)

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return vectors of the same shape."""
        output: torch.Tensor = self.output(F.gelu(self.inputs(vectors)))
        return output


class OutputHead(nn.Module):
    """Vectors (N, length, width) to logits (N, length, vocabulary)."""

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
    # What the blocks add to the stream of vectors has a variance that does not grow with their number.
    for block in network:
        if isinstance(block, TransformerBlock):
            for last in (block.attention.output, block.mlp.output):
                nn.init.normal_(last.weight, std=_INIT_STD / math.sqrt(2 * depth))


@torch.no_grad()
def generate(
    network: nn.Module, text: TextDataset, prompt: str, length: int, temperature: float = 1.0, seed: int = 0
) -> str:
    """Return `length` characters that a network writes after a prompt; after an empty one, as if on a new line.

    `network` returns logits as `transformer`'s do, on whatever device it is. Each character is drawn by its
    probability, which a temperature below 1 makes more, and one above 1 less, different from the others; the same seed
    draws the same. The network reads the last `text.context` characters.

    Raises ValueError for a temperature that is not above 0 or a length below 0.
    """
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be a number above 0, not {temperature}")
    if length < 0:
        raise ValueError(f"length must be at least 0, not {length}")
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
