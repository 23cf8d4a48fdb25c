# Two commands on a fresh clone: `make sweep` and `make test`.
# Needs Python 3.11 or newer with venv, pip and make; everything else lands in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONFIG ?= configs/dsv3.yaml
JOBS ?= 2

.PHONY: sweep results test check gate nightly clean

# `make results` makes the leaderboards of results/: hours from an empty compile cache.
# The trials are those of `make sweep` for what it shows, and few for the many others.
KEPT := configs/smoke.yaml configs/llama3-8b.yaml configs/jax-kernels.yaml
OTHERS := --device v6e --device v5p --device v5e

sweep: $(VENV)/.installed
	$(BIN)/autotune sweep $(CONFIG)

test: $(VENV)/.dev check
	$(BIN)/python -m pytest -n $(JOBS)

results: $(VENV)/.installed
	$(BIN)/autotune sweep configs/dsv3.yaml --jobs $(JOBS)
	$(BIN)/autotune sweep configs/dsv3.yaml $(OTHERS) --trials 6 --jobs $(JOBS)
	$(BIN)/autotune sweep $(KEPT) --device tpu7x $(OTHERS) --trials 6 --jobs $(JOBS)
	$(BIN)/autotune sweep configs/long-context.yaml --device tpu7x $(OTHERS) --trials 3 --jobs $(JOBS)
	$(BIN)/autotune sweep configs/attention-matrix.yaml --device tpu7x --device v6e --trials 6 --jobs $(JOBS)
	$(BIN)/autotune sweep configs/attention-matrix.yaml --device v5p --device v5e --trials 3 --jobs $(JOBS)

gate: $(VENV)/.installed
	$(BIN)/autotune gate tests/baselines --jobs $(JOBS)

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
