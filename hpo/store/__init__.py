"""Store a run on disk: its record, which is an Optuna study, and its run directory. No MPI, no torch."""
