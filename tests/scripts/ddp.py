"""A training script for torchrun, as users write it. It contains no code for a search."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.manual_seed(0)
    x = torch.randn(320, 8)
    y = x.sum(1, keepdim=True) + 0.1 * torch.randn(320, 1)
    data = TensorDataset(x[:256], y[:256])
    sampler: DistributedSampler[object] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler, num_workers=1)
    network = nn.Sequential(nn.Linear(8, args.hidden), nn.ReLU(), nn.Linear(args.hidden, 1))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        with torch.no_grad():
            loss = nn.functional.mse_loss(model(x[256:]), y[256:])
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(
                f"epoch {epoch} of {args.epochs}: "
                f"val_loss={loss.item() / dist.get_world_size():.6f}"
            )
    print(f"local rank {local_rank} has seen {len(sampler)} samples")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
