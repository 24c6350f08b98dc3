"""A script like nanoGPT's train.py.

All code is at module level, and each rank draws its own random batches.
"""

import os
import sys
from typing import Any

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

batch_size = 32
gradient_accumulation_steps = 4
max_iters = 20
learning_rate = 1e-2
rank_has_own_seed = True
for argument in sys.argv[1:]:
    name, value = argument.removeprefix("--").split("=")
    exec(f"{name} = {value}")

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group("gloo")
    rank = int(os.environ["RANK"])
    gradient_accumulation_steps //= int(os.environ["WORLD_SIZE"])
else:
    rank = 0
torch.manual_seed(1337 + rank_has_own_seed * rank)
data = torch.randint(0, 20, (260,), generator=torch.Generator().manual_seed(0)).sort().values


def get_batch(part):
    starts = torch.randint(len(part) - 8, (batch_size,)).tolist()
    return torch.stack([part[at : at + 8] for at in starts]), torch.stack(
        [part[at + 1 : at + 9] for at in starts]
    )


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens, targets):
        return cross_entropy(self.head(self.embedding(tokens)).flatten(0, 1), targets.flatten())


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = []
    for part in (data[:200], data[200:]):
        # Without it, only rank 0 draws here, and its batches differ from those of other ranks.
        with torch.random.fork_rng():
            losses.append(sum(model(*get_batch(part)).item() for _ in range(4)) / 4)
    model.train()
    return losses


model: Any = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
if ddp:
    model = DistributedDataParallel(model)
tokens, targets = get_batch(data[:200])
for iteration in range(max_iters + 1):
    if iteration % 10 == 0 and rank == 0:
        train_loss, val_loss = estimate_loss()
        print(f"step {iteration}: train loss {train_loss:.4f}, val loss {val_loss:.4f}")
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        loss = model(tokens, targets) / gradient_accumulation_steps
        tokens, targets = get_batch(data[:200])
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
if ddp:
    destroy_process_group()
