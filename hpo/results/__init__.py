"""Evaluate the results of a run: summary, winner, confirmation with other seeds.

Importing this package needs neither MPI nor torch.
"""
