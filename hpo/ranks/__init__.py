"""Communication between the ranks of a job, and the watch over each rank."""
