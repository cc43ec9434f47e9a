# make quickstart   install into .venv, tokenize a sample text and train a tiny GPT on this machine
# make setup test   install Slurm and the other system packages (apt), then run every check and test
# make quick        run the checks and the tests that start no processes: before each commit

# Hundreds of processes of the tests import the same modules, so their bytecode is kept, also where that is switched off.
export PYTHONDONTWRITEBYTECODE :=
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Every version that is installed is in constraints.txt, also torch's.
PIP := $(BIN)/pip install --quiet --constraint constraints.txt
TORCH := $(shell sed -n 's/^torch==\([0-9.]*\).*/\1/p' constraints.txt)
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help install setup quickstart quick test check pytest test-slow test-random chaos test-pythons test-slurm test-containers test-exchange test-guests test-deepspeed test-stores test-gpu test-gpu-shared layouts bench bench-data bench-train bench-deepspeed bench-precision bench-generation golden docs clean

help:
	@sed -n '1,/^$$/s/^# \(make .*\)/\1/p' Makefile
	@echo "others: install test check pytest test-slow test-random chaos test-pythons test-slurm test-gpu test-gpu-shared layouts bench bench-data bench-train bench-deepspeed bench-precision bench-generation golden docs clean"

install: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "hpcgen needs Python 3.10 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@# On a machine without GPUs a CPU build of torch saves gigabytes, where pip can find one.
	@if command -v nvidia-smi >/dev/null; then \
	    $(PIP) torch; \
	else \
	    $(PIP) "torch==$(TORCH)+cpu" 2>/dev/null \
	    || $(PIP) --extra-index-url https://download.pytorch.org/whl/cpu "torch==$(TORCH)+cpu" 2>/dev/null \
	    || $(PIP) torch; \
	fi
	$(PIP) --editable '.[dev,docs]'
	@touch $@

quickstart: $(READY)
	$(BIN)/hpcgen data sample examples/quickstart/text/corpus.jsonl.zst
	$(BIN)/hpcgen data plan -c examples/quickstart.yaml
	$(BIN)/hpcgen submit prepare train -c examples/quickstart.yaml --launcher local

# The tests of `test` use what setup installs, also under make -j.
.NOTPARALLEL:

# The checks run at the same time as the tests. Their output follows that of the tests.
define with_checks
@$(MAKE) --no-print-directory check >$(VENV)/check.log 2>&1 & checks=$$!; \
$(1); tests=$$?; \
wait $$checks; checks=$$?; cat $(VENV)/check.log; exit $$((tests || checks))
endef

test: $(READY)
	$(call with_checks,$(MAKE) --no-print-directory pytest)

quick: $(READY)
	$(call with_checks,$(BIN)/pytest --workers 2 -m 'not process and not slow and not gpu')

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# More workers than cores, since tests of Slurm mostly wait.
pytest: $(READY)
	$(BIN)/pytest --workers 5

test-slow: $(READY)
	$(BIN)/pytest -m slow

# Random models and layouts compared with a single process, with exact resumption: make test-random SEEDS="17 18"
test-random: $(READY)
	SEEDS="$(SEEDS)" $(BIN)/pytest -m slow tests/trainer/test_random_runs.py

# All kinds of faults in a training on two nodes, without and with accounting; the order and the steps follow from each
# seed: make chaos SEEDS="17 18"
chaos: $(READY)
	SEEDS="$(SEEDS)" $(BIN)/pytest -s -m slow tests/slurm/test_chaos.py

# Training stops on other Pythons and resumes there and here. Each has the packages of hpcgen's extra `train`, for example
# from `python3.12 -m venv DIR; DIR/bin/pip install -c constraints.txt '.[train]'`:
# make test-pythons PYTHONS="/path/of/python3.12 /path/of/python3.13"
test-pythons: $(READY)
	PYTHONS="$(PYTHONS)" $(BIN)/pytest -m slow tests/trainer/test_pythons.py

# The tests of Slurm with another Slurm than this machine's: make test-slurm SLURM=/path/of/its/prefix
test-slurm: $(READY)
	@[ -x "$(SLURM)/sbin/slurmctld" ] || { echo "SLURM=$(SLURM) has no sbin/slurmctld: make test-slurm SLURM=/path/of/its/prefix"; exit 2; }
	PATH="$(SLURM)/bin:$(SLURM)/sbin:$$PATH" $(BIN)/pytest --workers 5 tests/slurm

# Every stage in real containers on a real Slurm. Needs enroot, mksquashfs (squashfs-tools) and user namespaces, and
# pyxis's plugin built against this Slurm's headers (libslurm-dev; make in a clone of NVIDIA/pyxis):
# make test-containers PYXIS_PLUGIN=/path/of/spank_pyxis.so
test-containers: $(READY)
	$(BIN)/pytest -m slow tests/slurm/test_containers.py

# Checkpoints to and from Megatron-LM's own pretrain_gpt.py, on the CPU; its version should be megatron-core's:
# make test-exchange MEGATRON_LM=/path/of/its/checkout
test-exchange: $(READY)
	MEGATRON_LM="$(MEGATRON_LM)" $(BIN)/pytest -m slow tests/trainer/test_exchange.py

# The examples of DeepSpeed on the CPU, and as jobs of a real Slurm. tests/examples/deepspeed.py says what this Python
# needs: make test-deepspeed DEEPSPEED_PYTHON=/path/of/its/python
test-deepspeed: $(READY)
	DEEPSPEED_PYTHON="$(DEEPSPEED_PYTHON)" $(BIN)/pytest -m slow tests/examples tests/slurm/test_deepspeed.py

# Stage run with Megatron-LM and torchtitan on CPUs: bad nodes, killed ranks, time limits. torchtitan is in its own Python:
# make test-guests MEGATRON_LM=/path/of/its/checkout TORCHTITAN_PYTHON=/path/of/python
test-guests: $(READY)
	MEGATRON_LM="$(MEGATRON_LM)" TORCHTITAN_PYTHON="$(TORCHTITAN_PYTHON)" $(BIN)/pytest -m slow tests/slurm/test_guests.py

# Downloads from emulators of S3, Google Cloud Storage and, if azurite-blob is on PATH (npm install -g azurite), Azure.
test-stores: $(READY)
	$(PIP) --editable '.[stores]' 'moto[server]>=5' 'gcp-storage-emulator>=2024.8'
	$(BIN)/pytest tests/data/test_stores.py

test-gpu: $(READY)
	$(BIN)/pytest -m gpu

# Layouts of several ranks on one GPU, over NCCL's sockets. It shows that the numbers are right, and nothing about speed.
test-gpu-shared: $(READY)
	TESTS_SHARE_GPU=1 $(BIN)/pytest -m gpu tests/trainer/test_gpu.py

# Losses and gradient norms of every layout compared with a single process, on CPU in fp32.
layouts: $(READY)
	$(BIN)/python -m benchmarks.layouts

# Rendering against the floor of its imports.
bench: $(READY)
	$(BIN)/python -m benchmarks.render

# Data preparation against what its parts cost, and Megatron-LM's way; several minutes. Better of your own files:
# .venv/bin/python -m benchmarks.data CORPUS/*.jsonl.zst
bench-data: $(READY)
	$(BIN)/python -m benchmarks.data

# Training on the GPUs here compared with a bare Megatron-Core loop: make bench-train CORPUS=prefix of a .bin/.idx pair
# [MEGATRON_LM=checkout]. Needs Transformer Engine.
bench-train: $(READY)
	$(BIN)/python -m benchmarks.train $(CORPUS) $(if $(MEGATRON_LM),--megatron-lm $(MEGATRON_LM))

# Training on the GPUs here compared with DeepSpeed's ZeRO-2 and ZeRO-3: make bench-deepspeed CORPUS=prefix of a .bin/.idx pair.
# Needs deepspeed, transformers and Transformer Engine.
bench-deepspeed: $(READY)
	$(BIN)/python -m benchmarks.deepspeed $(CORPUS)

# FP8 compared with bf16 on the same text, on GPUs: make bench-precision CORPUS=...
bench-precision: $(READY)
	$(BIN)/python -m benchmarks.precision $(CORPUS)

# Generation compared with transformers, on a GPU if there is one.
bench-generation: $(READY)
	$(BIN)/python -m benchmarks.generation

golden: $(READY)
	$(BIN)/pytest tests/rendering/test_golden.py tests/test_messages.py --update-golden

# The docs site in build/docs. Fails on a broken link or anchor; fetches nothing.
docs: $(READY)
	$(BIN)/python -m sphinx -W --keep-going -q -c docs/site . build/docs
	@echo "build/docs/index.html"

# Tests that need one of these programs are skipped without it. Fails only where apt-get may install them and cannot.
SYSTEM_PACKAGES := slurm-wlm slurmdbd munge shellcheck environment-modules
# Debian 12's Python, 3.11.2, pickles in another way than later ones. Other systems have another version.
DEBIAN_PYTHON := python3.11
# The database of slurmdbd. These packages start no server. Older systems have a version in their names.
DEBIAN_DATABASE := mariadb-server-core mariadb-client-core

setup:
	@missing=; for program in sbatch slurmctld slurmd slurmdbd munged shellcheck; do \
	    PATH="$$PATH:/usr/sbin:/sbin" command -v $$program >/dev/null || missing="$$missing $$program"; \
	done; \
	[ -e /usr/share/modules/init/bash ] || missing="$$missing environment-modules"; \
	packages="$(SYSTEM_PACKAGES)"; \
	if grep -qs 'VERSION_CODENAME=bookworm' /etc/os-release; then \
	    packages="$$packages $(DEBIAN_PYTHON) $(DEBIAN_DATABASE)"; \
	    [ -x /usr/bin/$(DEBIAN_PYTHON) ] || missing="$$missing $(DEBIAN_PYTHON)"; \
	    [ -x /usr/sbin/mariadbd ] || missing="$$missing $(DEBIAN_DATABASE)"; \
	fi; \
	[ -z "$$missing" ] && exit 0; \
	sudo=; [ "$$(id -u)" = 0 ] || sudo="sudo -n"; \
	if command -v apt-get >/dev/null && $$sudo true 2>/dev/null; then \
	    $$sudo apt-get update -qq && \
	    $$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $$packages >/dev/null; \
	else \
	    echo "not installed:$$missing; the tests that need them are skipped (Debian: apt-get install $$packages)"; \
	fi

# Resolves pyproject.toml for every supported Python again; needs uv. Add UPGRADE=--upgrade for newer versions.
# make release-record VERSION=0.3.0 keeps what the release ships and sets, for hpcgen explain --diff 0.3.0.
.PHONY: release-record
release-record: $(READY)
	$(BIN)/python -m tests.releases hpcgen/releases/$(VERSION)

.PHONY: lock
lock:
	uv pip compile pyproject.toml --extra dev --extra docs --universal --python-version 3.10 --no-annotate --no-header --quiet \
	    $(UPGRADE) --output-file constraints.txt

clean:
	rm -rf $(VENV) build/docs examples/quickstart .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
