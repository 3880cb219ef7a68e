# Two commands set everything up: `make demo` (the whole loop on this machine) and `make test`.
PYTHON ?= python3.11
# Extra arguments for pip, e.g. PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu" for a CPU torch.
PIP_ARGS ?=
# Test files that run at once, each on about one core.
TEST_WORKERS ?= 2
BIN := .venv/bin
SHELL := /bin/bash

.PHONY: demo test browser check lint format clean
.DEFAULT_GOAL := test

.venv: .venv/.installed
.PHONY: .venv

# torch goes first and by exact version: a range may pull gigabytes of CUDA that nothing here needs.
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) "$$(grep -m1 '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	touch $@

demo: .venv
	$(BIN)/tlp demo

test: .venv browser
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile

# What tests/browser drives: the Chromium there is, else one is installed.
browser: .venv
	@bash tests/browser/install.sh

lint: .venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test

format: .venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build *.egg-info
