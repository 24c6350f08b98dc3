"""What search spaces share: data sets, networks, and training on a worker's ranks."""

from hpo.training.checks import check_choice, check_positive
from hpo.training.data import Dataset, Images, Split, load_data, load_test
from hpo.training.fit import fit
from hpo.training.judge import judge, judge_text, test_net
from hpo.training.losses import accuracy, cross_entropy
from hpo.training.net import Net
from hpo.training.parallel import ParallelSettings, share
from hpo.training.recipe import Recipe
from hpo.training.reference import fit_net
from hpo.training.resnet import resnet18
from hpo.training.text import Text, TextOnDevice, load_test_text, load_text
from hpo.training.transformer import transformer, write

__all__ = [
    "Dataset",
    "Images",
    "Net",
    "ParallelSettings",
    "Recipe",
    "Split",
    "Text",
    "TextOnDevice",
    "accuracy",
    "check_choice",
    "check_positive",
    "cross_entropy",
    "fit",
    "fit_net",
    "judge",
    "judge_text",
    "load_data",
    "load_test",
    "load_test_text",
    "load_text",
    "resnet18",
    "share",
    "test_net",
    "transformer",
    "write",
]
