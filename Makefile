# Two commands do everything on a fresh machine: `make demo` and `make test`.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.installed-base
DEV := $(VENV)/.installed-dev
# The build tools are installed first, so that constraints.txt pins them too.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-gpu lint clean help

help:  ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else f"hotlap needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}. Try: make PYTHON=python3.12 demo")'
	$(PYTHON) -m venv $(VENV)

$(BASE): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) hatchling editables
	$(INSTALL) --no-build-isolation -e .
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) hatchling editables
	$(INSTALL) --no-build-isolation -e '.[dev]'
	@touch $@ $(BASE)

demo: $(BASE)  ## set up, then train a small model on real data, on GPU or CPU
	$(BIN)/hotlap demo

test: $(DEV)  ## set up, then run all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

test-gpu:  ## run tests/gpu with whatever python holds torch; installs nothing
	@for python in $(PYTHON) $(BIN)/python; do \
	  if $$python -c 'import torch, pytest' 2>/dev/null; then \
	    PYTHONPATH="$(CURDIR)/src" exec $$python tests/gpu/together.py; fi; done; \
	echo "test-gpu: neither $(PYTHON) nor $(BIN)/python holds torch and pytest" >&2; exit 1

lint: $(DEV)  ## ruff, strict mypy, the import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
