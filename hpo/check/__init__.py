"""Checking a search space: one individual, evaluated shortly on all ranks, again, and on one; and what is wrong."""
