"""Evaluate one individual on one worker."""
