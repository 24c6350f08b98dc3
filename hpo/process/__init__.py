"""Basic functions of a process, without MPI and torch: its clock, output, stacks and exit."""
