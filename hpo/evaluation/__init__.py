"""Evaluate one individual on one worker: its process group, its trainers, and the verdict of its ranks."""
