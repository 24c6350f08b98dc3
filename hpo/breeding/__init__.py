"""Breed individuals (sets of hyperparameters): propagators, surrogates, the history of evaluations, and islands."""
