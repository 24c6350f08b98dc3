"""Show a run in a terminal while it is active: its status, the screen of `hpo watch`, and plain lines."""
