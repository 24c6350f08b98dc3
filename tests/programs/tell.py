"""Send results from a rank to its test."""

import json
import os


def tell(**found):
    """Print a line of JSON with one write, since mpirun mixes the output of ranks between writes."""
    os.write(1, (json.dumps(found) + "\n").encode())
