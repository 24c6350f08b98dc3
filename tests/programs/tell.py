"""How a rank tells a test what it has found."""

import json
import os


def tell(**found):
    """Print a line of JSON in one piece, since mpirun mixes what ranks print in several."""
    os.write(1, (json.dumps(found) + "\n").encode())
