"""Breed individuals: propagators, surrogates, the history of evaluations, and islands."""
