"""Evolutionary hyperparameter search with multi-rank workers."""

from hpo.prediction import Prediction
from hpo.space import Categorical, Float, Int, SearchSpace

__all__ = ["Categorical", "Float", "Int", "Prediction", "SearchSpace"]
