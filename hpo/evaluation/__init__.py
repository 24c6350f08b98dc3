"""Evaluate one individual (a set of hyperparameters) on one worker (a group of ranks that trains one network)."""
