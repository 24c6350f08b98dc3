"""Run a script under torchrun, and leave before Python is finalized.

There torch aborts at times if the script did not destroy its process group:
https://github.com/pytorch/pytorch/pull/179291
"""

import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
