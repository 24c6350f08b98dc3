"""Trainers, and the template that they are forked from.

They use torch, but never MPI. Ranks use MPI, but never torch.
"""
