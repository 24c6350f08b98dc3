"""What follows from the result of a run: what to do, why, and what to type."""
