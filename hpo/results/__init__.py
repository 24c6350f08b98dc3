"""Evaluate the results of a run: summary, winner, confirmation with other seeds. Imports neither MPI nor torch."""
