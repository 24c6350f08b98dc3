"""Run `hpo check` with several settings in turn, in one job: python checking.py SEARCH SETTINGS...

A job and its template (process that trainers are forked from) take several times as long to start as a check.
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
    """A template that several checks use in turn, each with its own settings."""

    def kill(self):
        """Do nothing, so that the template stays for the next check."""

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
