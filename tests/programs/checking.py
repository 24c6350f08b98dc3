"""Check a search with one setting after the other, as hpo check does, in one job: python checking.py SEARCH SETTINGS...

To start a job takes several times as long as a check.
"""

import sys
from pathlib import Path

from hpo.check.start import check
from hpo.layout import Layout
from hpo.process.printed import Printed
from hpo.ranks.communicator import finalize, world
from hpo.ranks.job import Job
from hpo.ranks.watch import Watch
from hpo.run.options import Options

comm = world()
printed = Printed(f"rank {comm.rank} of the job")
printed.install()
for settings in sys.argv[2:]:
    options = Options(Path(sys.argv[1]), settings=tuple(settings.split(",")), collective_timeout=5)
    with Watch(comm) as watch:
        status = check(options, Layout(comm.size, comm.size, 1), Job(comm, watch, printed))
    if comm.rank == 0:
        print(f"=== {status}", flush=True)
finalize()
