"""One process and what it can see of itself: its clock, output, stacks, signals and death. No MPI, no torch."""
