"""`hpo check`: evaluate one individual briefly several times, and report problems."""
