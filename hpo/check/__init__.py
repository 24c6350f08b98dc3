"""`hpo check`: evaluate one individual on all ranks and on one rank, and report problems."""
