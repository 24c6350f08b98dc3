"""What search spaces share: data sets, networks, and training on a worker's ranks."""

from hpo.training.checks import check_choice, check_positive
from hpo.training.data import Dataset, Images, Split, load_data, load_test
from hpo.training.fit import fit
from hpo.training.judge import evaluate_classifier, evaluate_language_model, test_net
from hpo.training.losses import per_sample_accuracy, per_sample_cross_entropy
from hpo.training.net import Net
from hpo.training.parallel import ParallelSettings, parallelize
from hpo.training.recipe import Recipe
from hpo.training.reference import fit_net
from hpo.training.resnet import resnet18
from hpo.training.text import Text, TextOnDevice, load_test_text, load_text
from hpo.training.transformer import generate, transformer

__all__ = [
    "Dataset",
    "Images",
    "Net",
    "ParallelSettings",
    "Recipe",
    "Split",
    "Text",
    "TextOnDevice",
    "check_choice",
    "check_positive",
    "evaluate_classifier",
    "evaluate_language_model",
    "fit",
    "fit_net",
    "generate",
    "load_data",
    "load_test",
    "load_test_text",
    "load_text",
    "parallelize",
    "per_sample_accuracy",
    "per_sample_cross_entropy",
    "resnet18",
    "test_net",
    "transformer",
]
