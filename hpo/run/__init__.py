"""One run, from its options to its report."""
