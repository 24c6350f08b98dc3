"""Check a search with one setting after the other, as hpo check does, in one job: python checking.py SEARCH SETTINGS...

To start a job, and a template, takes several times as long as a check.
"""

import sys
from pathlib import Path

from hpo.check.run_check import run_check
from hpo.evaluation.template_client import TemplateProcess
from hpo.layout import Layout
from hpo.ranks.communicator import finalize_mpi, get_world
from hpo.ranks.job import Job
from hpo.ranks.rank_watch import RankWatch
from hpo.run.options import Options


class LastingTemplate(TemplateProcess):
    """A template that several checks use, each with its own settings."""

    def kill(self):
        """Leave the template alone at the end of a check."""

    def end_at_last(self):
        super().kill()


comm = get_world()
template = LastingTemplate() if comm.rank == 0 else None
for settings in sys.argv[2:]:
    options = Options(Path(sys.argv[1]), settings=tuple(settings.split(",")), collective_timeout=5)
    with RankWatch(comm) as watch:
        status = run_check(options, Layout(comm.size, comm.size, 1), Job(comm, watch, template))
    if comm.rank == 0:
        print(f"=== {status}", flush=True)
if template is not None:
    template.end_at_last()
finalize_mpi()
