"""Communication between the ranks of a job, and the watch over each rank (a thread for signals and messages)."""
