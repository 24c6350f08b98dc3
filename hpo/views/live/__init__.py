"""Show a run in a terminal while it is active: its status, screens, and plain lines."""
