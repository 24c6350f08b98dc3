"""Compare the priors of hyperparameters with the evaluations of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hpo.breeding.encoding import GeneEncoding
from hpo.breeding.evaluation_history import find_informative
from hpo.breeding.prior_model import PriorModel
from hpo.objectives import Objectives
from hpo.results.genes import compute_genes, read_space
from hpo.space import Value
from hpo.store.evaluations import Evaluation

# Standard deviations that a correlation exceeds by chance in one of twenty cases.
_SIGNIFICANT = 1.645


@dataclass(frozen=True)
class PriorAgreement:
    """A prior, and whether evaluations agree with it."""

    name: str
    """The name of the hyperparameter."""
    value: Value
    """The value that the user expects to be good."""
    confidence: str
    """How sure the prior is: "low", "medium" or "high"."""
    correlation: float
    """Spearman's correlation of the ranks of the prior density and of success.

    It is positive if losses are lower near the expected value, and 0 for fewer than 5 evaluations.
    Failed evaluations are the worst.
    """
    verdict: str
    """Whether evaluations "agree", "contradict" or are "undecided".

    Chance decides in at most one of ten cases.
    """


def compare_priors(
    evaluations: Sequence[Evaluation],
    space: Mapping[str, str],
    priors: Mapping[str, str],
    objectives: Objectives,
) -> list[PriorAgreement]:
    """Return for each prior whether the evaluations agree with it.

    Args:
        space: Each parameter of the search space as text, by name.
        priors: Each parameter that has a prior as text, with its prior, by name.

    Raises:
        ValueError: If a text does not describe a parameter.
    """
    whole = read_space({**space, **{name: text for name, text in priors.items() if name in space}})
    if not whole.priors:
        return []
    compared = _select_compared(evaluations)
    if compared:
        costs = np.array([objectives.compute_costs(evaluation.values) for evaluation in compared])
        params = [evaluation.params for evaluation in compared]
        genes, active = compute_genes(params, GeneEncoding(whole))
        correlations, deviations = PriorModel(whole).compare(genes, active, costs)
    else:
        correlations = deviations = np.zeros(len(whole.priors))
    rows = zip(whole.priors.items(), correlations.tolist(), deviations.tolist(), strict=True)
    return [
        PriorAgreement(
            name, value, whole.parameters[name].confidence, correlation, _judge(distance)
        )
        for (name, value), correlation, distance in rows
    ]


def _select_compared(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """Return the complete and failed evaluations without long streaks of failures."""
    ended = [e for e in evaluations if e.inherits is None and e.state in ("complete", "failed")]
    ended.sort(key=lambda evaluation: (evaluation.ended, evaluation.trial))
    informative = find_informative(np.array([math.isfinite(e.loss) for e in ended], bool))
    return [ended[index] for index in informative]


def _judge(deviations: float) -> str:
    if abs(deviations) < _SIGNIFICANT:
        return "undecided"
    return "agree" if deviations > 0 else "contradict"
