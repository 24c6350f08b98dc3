"""Store a run on disk: the record of its evaluations (an Optuna study) and its run directory.

Importing this package needs neither MPI nor torch.
"""
