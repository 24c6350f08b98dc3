"""The ranks of a job: communicators whose waits sleep, steps that ranks take together, the watch over each of them."""
