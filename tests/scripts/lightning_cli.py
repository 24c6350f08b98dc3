"""A script for LightningCLI, as Lightning's documentation shows it."""

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset


class Model(L.LightningModule):
    def __init__(self, lr: float = 0.1, width: int = 8):
        super().__init__()
        self.lr = lr
        self.net = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 1))

    def training_step(self, batch, _):
        (inputs,) = batch
        return mse_loss(self.net(inputs), inputs.sum(1, keepdim=True))

    def validation_step(self, batch, _):
        self.log("val_loss", self.training_step(batch, _), sync_dist=True)

    def on_validation_epoch_end(self):
        self.print(f"val_loss={self.trainer.callback_metrics['val_loss']:.5f}")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(64, 4)), 16)

    def val_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(32, 4)), 16)


if __name__ == "__main__":
    LightningCLI(Model, Data, trainer_defaults={"max_epochs": 1, "accelerator": "cpu"})
