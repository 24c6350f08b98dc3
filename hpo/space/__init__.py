"""The search space: hyperparameters with conditions and priors, and constraints between them."""

from hpo.space.constraints import ConstraintSet
from hpo.space.parameters import Categorical, Float, Gene, Int, Ordinal, Parameter, Value
from hpo.space.search_space import SearchSpace

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
]
