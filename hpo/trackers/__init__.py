"""Send the evaluations of a run to experiment trackers, each in a process of its own."""
