"""What the shipped search spaces share: data sets, the reference network, and training on a worker's ranks."""

from hpo.training.data import Dataset, Split, load_data, load_test
from hpo.training.fit import Schedule, check_positive, fit
from hpo.training.judge import judge, test_net
from hpo.training.net import Net
from hpo.training.reference import fit_net
from hpo.training.resnet import resnet18
from hpo.training.text import Text, load_test_text, load_text
from hpo.training.transformer import transformer, write

__all__ = [
    "Dataset",
    "Net",
    "Schedule",
    "Split",
    "Text",
    "check_positive",
    "fit",
    "fit_net",
    "judge",
    "load_data",
    "load_test",
    "load_test_text",
    "load_text",
    "resnet18",
    "test_net",
    "transformer",
    "write",
]
