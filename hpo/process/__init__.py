"""Basic functions of a process: its clock, output, stacks, signals and exit. They need neither MPI nor torch."""
