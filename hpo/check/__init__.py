"""`hpo check`: evaluate one individual briefly on all ranks, again, and on one rank, and report problems."""
