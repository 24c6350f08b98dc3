"""Data sets, networks and training on the ranks of a worker, for use in search files."""

from hpo.training.fit import fit
from hpo.training.image_data import ImageDataset, ImagesOnDevice, LabelledImages, load_data, load_test_data
from hpo.training.network_evaluation import evaluate_classifier, evaluate_language_model
from hpo.training.parallel import ParallelSettings, parallelize
from hpo.training.per_sample_losses import per_sample_accuracy, per_sample_cross_entropy
from hpo.training.recipe import Recipe
from hpo.training.resnet import resnet18
from hpo.training.setting_checks import check_choice, check_positive
from hpo.training.text_data import TextDataset, TextOnDevice, load_test_text, load_text
from hpo.training.transformer import generate, make_transformer
from hpo.training.validation import compute_means, select_predictions, should_stop_early

__all__ = [
    "ImageDataset",
    "ImagesOnDevice",
    "LabelledImages",
    "ParallelSettings",
    "Recipe",
    "TextDataset",
    "TextOnDevice",
    "check_choice",
    "check_positive",
    "compute_means",
    "evaluate_classifier",
    "evaluate_language_model",
    "fit",
    "generate",
    "load_data",
    "load_test_data",
    "load_test_text",
    "load_text",
    "make_transformer",
    "parallelize",
    "per_sample_accuracy",
    "per_sample_cross_entropy",
    "resnet18",
    "select_predictions",
    "should_stop_early",
]
