"""Run a search, from its options to its report."""
