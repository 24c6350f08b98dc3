"""What came out of a run: its summary, its winner, how sure that is. No MPI, no torch."""
