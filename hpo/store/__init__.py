"""What a run leaves on disk: its record, an Optuna study, and the run directory around it. No MPI, no torch."""
