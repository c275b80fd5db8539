# `make run` and `make test` need only python3 (3.11 or newer), pip and make. Everything goes into .venv.
PYTHON ?= python3
VENV ?= .venv
MODEL := smollm2-135m

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help env model run test lint types docs docs-serve docs-browser lock clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*##/make \1  -/p' Makefile

env: $(STAMP)  ## install the project and its tools into .venv, once

model: $(STAMP)  ## put the default model on this machine, once
	@$(BIN)/pariskv model fetch $(MODEL)

run: model  ## decode a long prompt on this machine and compare with dense attention
	$(BIN)/pariskv run configs/smollm2.yaml --compare dense

test: model  ## run the tests, on four processes at most
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

lint: $(STAMP)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## mypy, strict
	$(BIN)/mypy

docs: $(STAMP)  ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-serve: $(STAMP)  ## show the documentation on http://127.0.0.1:8000, rebuilt as it is written
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

docs-browser: $(STAMP)  ## open every page of the documentation in Chromium, where that is installed
	$(BIN)/python -m pytest -rs tests/docs/test_browser.py

lock: $(STAMP)  ## write the installed versions into constraints.txt
	@sed -n '/^#/p' constraints.txt > constraints.new
	@$(BIN)/python -c "from importlib.metadata import distributions; \
	found = {d.name.lower().replace('_', '-'): d.version.split('+')[0] for d in distributions()}; \
	print(*(f'{name}=={found[name]}' for name in sorted(found) if name != 'pariskv'), sep='\n')" >> constraints.new
	@mv constraints.new constraints.txt

clean:  ## remove .venv and everything that was built
	rm -rf $(VENV) site dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find pariskv plugins kernels tests -name __pycache__ -type d -prune -exec rm -rf {} +

# A venv without pip, because Debian's python3 lacks ensurepip; pip installs into it from outside.
# The environment is made anew only where there is none, or its Python is gone.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not here; install Python 3.11 or newer, or: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("$(PYTHON) is Python %d.%d; pariskv needs 3.11 or newer: make PYTHON=python3.11" % v[:2])'
	@test -x $(BIN)/python || $(PYTHON) -m venv --without-pip --clear $(VENV)
	@if $(PYTHON) -m pip --version >/dev/null 2>&1; then pip="$(PYTHON) -m pip --python $(BIN)/python"; \
	elif command -v pip3 >/dev/null; then pip="pip3 --python $(BIN)/python"; \
	elif $(BIN)/python -m ensurepip >/dev/null 2>&1; then pip="$(BIN)/python -m pip"; \
	else echo "there is no pip for $(PYTHON); on Debian and Ubuntu: apt install python3-pip" >&2; exit 1; fi; \
	echo "installing into $(VENV), once"; \
	$$pip install --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@
