"""Send results from a rank to its test."""

import json
import os


def tell(**found):
    """Print a line of JSON, with a single write. mpirun may print the output of other ranks between two writes."""
    os.write(1, (json.dumps(found) + "\n").encode())
