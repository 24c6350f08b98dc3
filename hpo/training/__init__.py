"""Data sets, networks, and what torch lacks for training on several ranks."""

from hpo.training.image_data import (
    ImageDataset,
    ImagesOnDevice,
    LabelledImages,
    augment_images,
    load_data,
    load_test_data,
)
from hpo.training.loop import (
    check_choice,
    check_positive,
    compute_lr_factor,
    compute_means,
    decay_weights,
    select_predictions,
    should_stop_early,
)
from hpo.training.pipeline import Pipeline, list_blocks, make_autocast
from hpo.training.shared_layers import DropoutMasks, replace_batch_norm, replace_dropout
from hpo.training.sharing import (
    ParallelSettings,
    SharedGradScaler,
    clip_gradients,
    gather_state,
    gather_weights,
    load_state,
    make_mesh,
    split_batch,
)
from hpo.training.text_data import TextDataset, TextOnDevice, load_test_text, load_text
from hpo.training.transformer import generate, make_transformer

__all__ = [
    "DropoutMasks",
    "ImageDataset",
    "ImagesOnDevice",
    "LabelledImages",
    "ParallelSettings",
    "Pipeline",
    "SharedGradScaler",
    "TextDataset",
    "TextOnDevice",
    "augment_images",
    "check_choice",
    "check_positive",
    "clip_gradients",
    "compute_lr_factor",
    "compute_means",
    "decay_weights",
    "gather_state",
    "gather_weights",
    "generate",
    "list_blocks",
    "load_data",
    "load_state",
    "load_test_data",
    "load_test_text",
    "load_text",
    "make_autocast",
    "make_mesh",
    "make_transformer",
    "replace_batch_norm",
    "replace_dropout",
    "select_predictions",
    "should_stop_early",
    "split_batch",
]
