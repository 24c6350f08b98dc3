"""Augment batches of images at random, on the device that has them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hpo.training.setting_checks import check_choice


def augment_images(images: torch.Tensor, drawn: torch.Tensor, augmentation: str) -> torch.Tensor:
    """Shift images by up to an eighth of their size; "crop-and-flip" also mirrors half.

    He et al. 2016, section 4.2, shift by up to four of 32 pixels for CIFAR-10. The border is filled
    with zeros, the mean of normalised images.

    Args:
        images: Normalised images, shape (N, channels, height, width).
        drawn: Random numbers from 0 to 1, shape (N, 3), on the CPU: two for the shift, one for the
            mirror.
        augmentation: "none" (images are returned unchanged), "crop" or "crop-and-flip".

    Raises:
        ValueError: `augmentation` has another value.

    Returns:
        Images of the same shape, in channels-last format if they were augmented.
    """
    check_choice("augmentation", augmentation, ("none", "crop", "crop-and-flip"))
    if augmentation == "none":
        return images
    height, width = images.shape[2:]
    most = torch.tensor([height // 8, width // 8])
    moves = (drawn[:, :2] * (2 * most + 1)).long()
    flipped = drawn[:, 2] < (0.5 if augmentation == "crop-and-flip" else 0.0)
    rows = moves[:, 0, None] + torch.arange(height)
    columns = (
        torch.where(flipped[:, None], torch.arange(width - 1, -1, -1), torch.arange(width))
        + moves[:, 1, None]
    )
    padded = F.pad(images, (width // 8, width // 8, height // 8, height // 8)).permute(0, 2, 3, 1)
    device = images.device
    samples = torch.arange(len(images), device=device)[:, None, None]
    # The indexed tensor has shape (N, height, width, channels), so its permutation has
    # channels-last format.
    return padded[samples, rows.to(device)[:, :, None], columns.to(device)[:, None, :]].permute(
        0, 3, 1, 2
    )
