# Two commands on a fresh clone: `make sweep` and `make test`.
# Needs Python 3.11 or newer with venv, pip and make; everything else lands in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONFIG ?= configs/dsv3.yaml
JOBS ?= 2

.PHONY: sweep test check nightly clean

sweep: $(VENV)/.installed
	$(BIN)/autotune sweep $(CONFIG)

test: $(VENV)/.dev check
	$(BIN)/python -m pytest -n $(JOBS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

nightly: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(JOBS) -m nightly

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV)
