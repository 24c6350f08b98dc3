"""A script without DistributedDataParallel.

It averages over ranks by its own code, or does not average.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss


class Engine(nn.Module):
    """Wraps a network as DeepSpeed does.

    The parameters are views of one flat tensor. The optimizer of each rank updates a copy of the
    whole tensor, or a part.
    """

    def __init__(self, module, lr, has_parts):
        super().__init__()
        self.module, self.world = module, dist.get_world_size()
        self.views = list(module.parameters())
        sizes = [view.numel() for view in self.views]
        self.flat = torch.zeros(-(-sum(sizes) // self.world) * self.world)
        for view, piece in zip(self.views, self.flat[: sum(sizes)].split(sizes), strict=True):
            piece.copy_(view.data.flatten())
            view.data = piece.view_as(view)
        count = len(self.flat) // self.world if has_parts else len(self.flat)
        self.own = (
            slice(count * dist.get_rank(), count * (dist.get_rank() + 1))
            if has_parts
            else slice(None)
        )
        self.optimizer = torch.optim.Adam([nn.Parameter(self.flat[self.own].clone())], lr)

    def forward(self, inputs):
        return self.module(inputs)

    def step(self):
        (part,) = self.optimizer.param_groups[0]["params"]
        gradients = torch.cat([view.grad.flatten() for view in self.views])
        gradients = nn.functional.pad(gradients, (0, len(self.flat) - len(gradients)))
        dist.all_reduce(gradients)
        part.grad = gradients[self.own] / self.world
        self.optimizer.step()
        parts = [torch.empty_like(part.data) for _ in range(self.world)]
        dist.all_gather(parts, part.data)
        self.flat.copy_(torch.cat(parts) if len(part) < len(self.flat) else part.data)
        self.module.zero_grad()


class Noisy(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs) + torch.randn(len(inputs), 1)


def average(tensors):
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--way")
    parser.add_argument("--lr", type=float)
    args = parser.parse_args()
    way = args.way
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    inputs = torch.randn(320, 8)
    targets = inputs.sum(1, keepdim=True)
    network = nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), Noisy(16, 1) if way == "noise" else nn.Linear(16, 1)
    )
    model: nn.Module = (
        Engine(network, args.lr, way == "parts") if way in ("flat", "parts") else network
    )
    optimizer = torch.optim.Adam(network.parameters(), args.lr)
    for step in range(10):
        shares = range(32 * step + rank, 32 * step + 32, world)
        batch = range(32 * step, 32 * step + 32 // world) if way == "same" else shares
        mse_loss(model(inputs[batch]), targets[batch]).backward()
        if isinstance(model, Engine):
            model.step()
        else:
            if way not in ("weights", "forgotten"):
                average([parameter.grad for parameter in network.parameters()])
            optimizer.step()
            optimizer.zero_grad()
            if way == "weights":
                average([parameter.data for parameter in network.parameters()])
        if step % 5 == 4:
            with torch.no_grad():
                loss = mse_loss(model(inputs[:64]), targets[:64])
            if rank == 0:
                print(f"val_loss={loss.item():.6f}")
    dist.destroy_process_group()


main()
