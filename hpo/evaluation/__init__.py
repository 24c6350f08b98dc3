"""One individual, one loss: the worker, its process group, and the verdict of its ranks."""
