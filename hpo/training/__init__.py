"""Data sets, networks and training on the ranks of a worker, for use in search files."""

from hpo.training.fit import fit
from hpo.training.image_data import ImageDataset, ImagesOnDevice, LabelledImages, load_data, load_test_data
from hpo.training.network_evaluation import evaluate_classifier, evaluate_language_model, evaluate_net
from hpo.training.parallel import ParallelSettings, parallelize
from hpo.training.per_sample_losses import per_sample_accuracy, per_sample_cross_entropy
from hpo.training.recipe import Recipe
from hpo.training.reference_net import Net
from hpo.training.reference_problem import fit_net
from hpo.training.resnet import resnet18
from hpo.training.setting_checks import check_choice, check_positive
from hpo.training.text_data import TextDataset, TextOnDevice, load_test_text, load_text
from hpo.training.transformer import generate, make_transformer

__all__ = [
    "ImageDataset",
    "ImagesOnDevice",
    "LabelledImages",
    "Net",
    "ParallelSettings",
    "Recipe",
    "TextDataset",
    "TextOnDevice",
    "check_choice",
    "check_positive",
    "evaluate_classifier",
    "evaluate_language_model",
    "evaluate_net",
    "fit",
    "fit_net",
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
]
