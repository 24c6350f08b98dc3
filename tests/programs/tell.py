"""Send results from a rank to its test."""

import json
import os


def tell(**found):
    """Print a line of JSON with one write: mpirun may print other output between two."""
    os.write(1, (json.dumps(found) + "\n").encode())
