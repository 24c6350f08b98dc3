"""Give advice after a run: what to do next, the evidence for it, and the command to type."""
