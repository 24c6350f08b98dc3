"""The process in which an objective runs: its template, process group and worker. It uses torch, and no MPI."""
