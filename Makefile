# make demo    from a fresh clone to a trained, exported, generating model (see README.md)
# make test    everything that a change must pass
# make lint    ruff and mypy only
# make nightly the slow tests
# make bench   the tables of the README
# make ops     the fused gate operators, for training and generation; optional, needs a C++ compiler, and nvcc for those of GPUs
#
# Settings, as in `make demo PYTHON=python3.12`:
#   PYTHON  any Python from 3.11 on
#   TORCH   what to give pip for torch. On Linux, PyPI's torch is the CUDA build, several gigabytes. Without a GPU, take a CPU
#           build: a wheel's path or URL, or `TORCH=torch==2.13.0+cpu` with PIP_EXTRA_INDEX_URL set to PyTorch's CPU packages.
PYTHON ?= python3
TORCH ?= torch==2.13.0

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock

.PHONY: demo test lint nightly bench install ops
.DEFAULT_GOAL := demo

demo: $(INSTALLED)
	@$(BIN)/python -m model.ops.build || echo "(optional: the demo goes on without them)"
	@$(BIN)/python launchers/demo.py

test: lint
	@echo "== fused gate operators (without them, their tests are skipped)"
	@$(BIN)/python -m model.ops.build || true
	@echo "== tests"
	@$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

lint: $(INSTALLED)
	@echo "== ruff"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@echo "== mypy"
	@$(BIN)/mypy

nightly: $(INSTALLED)
	@$(BIN)/python -m model.ops.build || true
	@$(BIN)/python -m pytest -m nightly

bench: ops
	@$(BIN)/python -m benchmarks.communication
	@$(BIN)/python -m benchmarks.train_step
	@$(BIN)/python -m benchmarks.gradient_precision
	@$(BIN)/python -m benchmarks.gate
	@$(BIN)/python -m benchmarks.data

ops: $(INSTALLED)
	@$(BIN)/python -m model.ops.build

install: $(INSTALLED)

# The stamp makes a second `make` quick; it is older than setup.cfg or the lock file when these change, and pip then catches up.
$(INSTALLED): setup.cfg pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "This needs Python 3.11 or later, and $(PYTHON) is not: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	@echo "== installing into $(VENV) (once, a few minutes): $(TORCH); without a GPU, see TORCH in the Makefile for a smaller build"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) "$(TORCH)"
	@echo "== installing the other packages of requirements.lock"
	@$(PIP_INSTALL) --editable ".[hf,dev]"
	@touch $@
