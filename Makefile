# make demo and make test are each one command on a fresh machine with Python 3.11 or 3.12.
#
# PYTHON: the Python that makes .venv. PIP_FLAGS: passed to pip. On a plain Python 3.12 (and from PyPI on any Linux) pip
# takes the CUDA build of torch, about 5 GB; it works without a GPU.
PYTHON ?= python3
PIP_FLAGS ?=
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.made

# mpiexec looks for its proxy beside itself, so the environment's programs come first.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
export OMP_NUM_THREADS ?= 1

.PHONY: help setup demo test test-unit test-mpi test-runs test-gpu bench bench-gpu bench-gpus test-fast
.PHONY: slurm-up slurm-down slurm-test clean
.DEFAULT_GOAL := help
.NOTPARALLEL:

help:
	@echo 'make demo       the main job on this machine: a host moves while it trains (under 4 minutes on 2 cores)'
	@echo 'make test       all tests'
	@echo 'make test-fast  unit tests and a quick selection of the others (under 3 minutes)'
	@echo 'make test-gpu   tests on GPUs; results in analysis/results (OUT=folder, ONLY=test_moves,mpi)'
	@echo 'make bench      figures of moves on this machine'
	@echo 'make bench-gpu  figures of moves on GPUs; results in analysis/results (OUT=folder, PARTS=a,b)'
	@echo 'make bench-gpus the same with a GPU for every process (8 or 4), in nine minutes (PLAN=1: what and how long)'
	@echo 'make slurm-up   a Slurm of four virtual nodes on this machine (root, Debian packages); make slurm-down ends it'
	@echo 'make slurm-test tests on such a Slurm; without root or its packages those that need it are skipped'
	@echo 'make setup      the environment in .venv; the others do it first, and it is done only once'
	@echo 'make clean      removes .venv and what tests and builds leave; runs/ stays'
	@echo 'Options: PYTHON=python3.11 PIP_FLAGS="..."'

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(v not in ((3, 11), (3, 12)) and \
	    "Python 3.11 or 3.12 is needed; $(PYTHON) is %d.%d. Name another one: make setup PYTHON=python3.11" % v)'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --disable-pip-version-check --quiet $(PIP_FLAGS) -e '.[test]'
	@command -v gcc > /dev/null && $(RUN) -m third_party.nccl.overlay || echo 'no gcc: GPUs need it, CPUs do not'
	@touch $@

demo: setup
	$(RUN) harness.py demo

# Each part prints its own closing line; one that fails makes make fail. The tests on a Slurm mostly wait for it, so the
# unit tests and those in 4 ranks run beside them; whole runs have the machine for themselves.
test: setup
	@tests/beside.sh '$(MAKE) slurm-test' '$(MAKE) test-unit test-mpi'
	@$(MAKE) test-runs

test-unit: setup
	$(RUN) -m pytest -q tests/unit

test-mpi: setup
	PYTHON=$(RUN) tests/run_mpi_tests.sh

test-runs: setup
	$(RUN) -m pytest -q tests/runs

# On a machine with GPUs: the tests in 4 ranks on NCCL, and those of tests/gpu. OUT: where the results go instead of
# analysis/results; ONLY=mpi or ONLY=gpu: one part; LM_NCCL: another libnccl.so.2 than torch's.
test-gpu: setup
	$(RUN) tests/gpu/run_all.py $(if $(OUT),--out $(OUT)) $(if $(ONLY),--only $(ONLY))

# Medians of 20 moves by each arm and of 3 plain save and restarts, and the cost of the process-group wrapper.
bench: setup
	$(RUN) harness.py --experiment ablation --rounds 20 --restarts 3
	$(RUN) -m analysis.wrapper_cost

# What moves cost on GPUs; PARTS=moves,host,state,beside,soak,m24 chooses, OUT as above.
bench-gpu: setup
	$(RUN) -m analysis.bench_gpu $(if $(OUT),--out $(OUT)) $(if $(PARTS),--parts $(PARTS))

# Moves with a GPU for every process; PARTS=moves,ablation,switches,kill chooses, PLAN=1 only says how long it takes.
bench-gpus: setup
	$(RUN) -m analysis.bench_gpus $(if $(OUT),--out $(OUT)) $(if $(PARTS),--parts $(PARTS)) $(if $(PLAN),--plan)

test-fast: setup
	$(RUN) -m pytest -q tests/unit
	PYTHON=$(RUN) tests/run_mpi_tests.sh -m fast
	$(RUN) -m pytest -q -m fast tests/runs

slurm-test: setup
	$(RUN) -m pytest -q -rs tests/slurm

slurm-up: setup
	@$(RUN) -m slurm up

slurm-down: setup
	@$(RUN) -m slurm down

clean:
	rm -rf $(VENV) *.egg-info .pytest_cache build
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
