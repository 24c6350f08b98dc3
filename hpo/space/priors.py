"""Priors: values that the user expects to be good, and how close good values are.

A prior of a number is a normal distribution of the gene (number that encodes the value) around the
expected value. The range of the parameter cuts it off. A prior of a categorical parameter makes the
expected choice more likely than each other choice. The widths are those of NePS
(https://github.com/automl/neps).
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from hpo.space.parameters import Categorical, Gene, Parameter, format_parameter

DEVIATIONS = {"low": 0.5, "medium": 0.25, "high": 0.125}
"""The standard deviation of a prior by its confidence, as a share of the parameter's range."""
ODDS = {"low": 2, "medium": 4, "high": 6}
"""How many times as likely as each other choice the expected choice is, by confidence."""


def draw_uniform_gene(parameter: Parameter, rng: Random) -> Gene:
    """Return a random gene, uniform between the parameter's limits."""
    low, high = parameter.limits
    return rng.uniform(low, high) if parameter.is_continuous else rng.randint(int(low), int(high))


def draw_prior_gene(parameter: Parameter, rng: Random) -> Gene:
    """Return a random gene from a parameter's prior, or a uniform one if it has no prior."""
    if parameter.prior is None:
        return draw_uniform_gene(parameter, rng)
    expected = parameter.encode(parameter.prior)
    low, high = parameter.limits
    if isinstance(parameter, Categorical):
        odds = ODDS[parameter.confidence]
        return (
            expected
            if rng.random() * (high + odds) < odds
            else _draw_other(expected, int(high), rng)
        )
    deviation = compute_deviation(parameter)
    while True:
        gene = rng.gauss(expected, deviation)
        gene = gene if parameter.is_continuous else round(gene)
        if low <= gene <= high:
            return gene


def compute_deviation(parameter: Parameter) -> float:
    """Return the standard deviation of the gene of a number around the expected value."""
    low, high = parameter.limits
    width = high - low if parameter.is_continuous else high - low + 1
    return DEVIATIONS[parameter.confidence] * width


def _draw_other(expected: Gene, highest: int, rng: Random) -> Gene:
    other = rng.randrange(highest)
    return other if other < expected else other + 1


def describe_priors(parameters: Mapping[str, Parameter]) -> dict[str, str]:
    """Return each parameter with a prior as text. A resumed run may have other priors."""
    return {
        name: format_parameter(each) for name, each in parameters.items() if each.prior is not None
    }
