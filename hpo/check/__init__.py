"""`hpo check`: evaluate one individual briefly, twice on all ranks and once on one rank, and report problems."""
