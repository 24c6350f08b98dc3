"""Run a program of hpo whose template is forked by a template server of the tests: run_forking.py SERVER PROGRAM ..."""

import sys

from tests.support.forked_template import fork_templates, run_python

del sys.path[0]  # the folder of this file
fork_templates(sys.argv[1])
run_python(sys.argv[2:])
