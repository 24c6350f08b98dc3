"""What search spaces share: data sets, networks, and training on a worker's ranks."""

from hpo.training.checks import check_positive
from hpo.training.data import Dataset, Images, Split, load_data, load_test
from hpo.training.fit import fit
from hpo.training.judge import judge, test_net
from hpo.training.losses import accuracy, cross_entropy
from hpo.training.net import Net
from hpo.training.parallel import ParallelSettings
from hpo.training.recipe import Recipe
from hpo.training.reference import fit_net

__all__ = [
    "Dataset",
    "Images",
    "Net",
    "ParallelSettings",
    "Recipe",
    "Split",
    "accuracy",
    "check_positive",
    "cross_entropy",
    "fit",
    "fit_net",
    "judge",
    "load_data",
    "load_test",
    "test_net",
]
