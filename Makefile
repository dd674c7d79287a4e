# make demo    questions answered from documents by the bundled model
# make test    the tests
# make check   linter, formatter, types, import rules
#
# Each of them makes its own environment in .venv first. pip always reads constraints.txt: without it, pip takes the
# newest torch, which on Linux can bring several gigabytes of GPU libraries.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test check format clean

demo: $(VENV)/.installed
	$(BIN)/kvmosaic demo

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not alone"
	$(BIN)/python -m pytest -m alone

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kvmosaic needs Python 3.11 or newer; try: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing kvmosaic into $(VENV) (the first time this takes a minute or two)"
	$(INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(INSTALL) -e '.[dev]'
	@touch $@
