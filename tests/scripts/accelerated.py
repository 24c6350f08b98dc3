"""Train with Accelerate, started by torchrun or `accelerate launch`."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--mixed_precision", default="no")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    accelerator = Accelerator(cpu=True, mixed_precision=args.mixed_precision)
    set_seed(0)
    digits = load_digits()
    inputs, labels = torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target)
    train = DataLoader(TensorDataset(inputs[:512], labels[:512]), batch_size=32, shuffle=True)
    val = DataLoader(TensorDataset(inputs[512:768], labels[512:768]), batch_size=64)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    model, optimizer, train, val = accelerator.prepare(model, optimizer, train, val)
    for epoch in range(args.epochs):
        for batch, targets in train:
            optimizer.zero_grad()
            outputs = model(batch)
            accelerator.backward(cross_entropy(outputs, targets))
            optimizer.step()
        losses = []
        with torch.no_grad():
            for batch, targets in val:
                loss = cross_entropy(model(batch), targets, reduction="none")
                losses.append(accelerator.gather_for_metrics(loss))
        accelerator.print(f"epoch {epoch}: val_loss={torch.cat(losses).mean().item():.6f}")
    with accelerator.autocast():
        dtype = torch.mm(inputs[:1], inputs[:1].T).dtype
    print(
        f"process {accelerator.process_index} of {accelerator.num_processes}, local "
        f"{accelerator.local_process_index}, main {accelerator.is_main_process}, local main "
        f"{accelerator.is_local_main_process}, {accelerator.mixed_precision} computes {dtype}, "
        f"{len(train)} batches"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
