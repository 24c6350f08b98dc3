"""The process in which an objective runs: its template, process group and worker. torch, and no MPI."""
