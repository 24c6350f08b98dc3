"""The search space: hyperparameters, conditions, priors and constraints."""

from hpo.space.constraints import ConstraintSet
from hpo.space.parameters import Categorical, Float, Gene, Int, Ordinal, Parameter, Value
from hpo.space.search_space import SearchSpace, make_key

__all__ = [
    "Categorical",
    "ConstraintSet",
    "Float",
    "Gene",
    "Int",
    "Ordinal",
    "Parameter",
    "SearchSpace",
    "Value",
    "make_key",
]
