"""Run a program whose template is forked by a server: run_forking.py SERVER PROGRAM ..."""

import sys

from tests.support.forked_template import fork_templates, run_python

del sys.path[0]  # the folder of this file
fork_templates(sys.argv[1])
run_python(sys.argv[2:])
