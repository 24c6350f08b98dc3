"""Augmentation of images in whole batches, on the device that they are on."""

from __future__ import annotations

import torch
import torch.nn.functional as F

AUGMENTATIONS = ("none", "crop", "crop-and-flip")

DRAWS_PER_SAMPLE = 3  # that are drawn for each sample


def augment_images(images: torch.Tensor, drawn: torch.Tensor, augmentation: str) -> torch.Tensor:
    """Return images (N, C, H, W), normalised, each moved by up to an eighth of its size, and perhaps mirrored.

    `drawn` are random numbers, shape (N, 3), from 0 to 1: two for the move, one for the mirror. What moves in at the
    border is the mean of all images. (He et al. 2016, section 4.2: four pixels of 32 for CIFAR-10.)
    """
    if augmentation == "none":
        return images
    height, width = images.shape[2:]
    most = torch.tensor([height // 8, width // 8])
    moves = (drawn[:, :2] * (2 * most + 1)).long()
    flipped = drawn[:, 2] < (0.5 if augmentation == "crop-and-flip" else 0.0)
    rows = moves[:, 0, None] + torch.arange(height)
    columns = torch.where(flipped[:, None], torch.arange(width - 1, -1, -1), torch.arange(width)) + moves[:, 1, None]
    padded = F.pad(images, (width // 8, width // 8, height // 8, height // 8)).permute(0, 2, 3, 1)
    device = images.device
    samples = torch.arange(len(images), device=device)[:, None, None]
    # (N, H, W, C): as it lies in memory, this is channels_last.
    return padded[samples, rows.to(device)[:, :, None], columns.to(device)[:, None, :]].permute(0, 3, 1, 2)
