"""Breed individuals: propagators, the surrogate, the history of evaluations, and Propulate's islands."""
