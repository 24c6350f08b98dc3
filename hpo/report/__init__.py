"""What people look at; it reads the record and nothing else."""
