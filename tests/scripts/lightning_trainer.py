"""Train with Lightning's Trainer on two processes."""

import argparse

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


class Digits(lightning.LightningModule):
    def __init__(self, width, lr):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def training_step(self, batch, _):
        return cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, _):
        self.log(
            "val_loss", cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True, prog_bar=True
        )

    def on_validation_epoch_end(self):
        self.print(f"val_loss={self.trainer.callback_metrics['val_loss']:.6f}")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.lr)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--width", type=int, default=32)
    args = parser.parse_args()
    lightning.seed_everything(0)
    digits = load_digits()
    inputs, labels = torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target)
    train = DataLoader(TensorDataset(inputs[:512], labels[:512]), 32, shuffle=True)
    val = DataLoader(TensorDataset(inputs[512:768], labels[512:768]), 64)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Digits(args.width, args.lr), train, val)


if __name__ == "__main__":
    main()
