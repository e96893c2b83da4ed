# Everything happens in .venv; only Python (3.10 to 3.12, with the venv module) must be there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# With more threads than one, the server's processes fight for the cores of a small machine.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup demo record test lint

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-7s %s\n", $$1, $$2 }' Makefile

setup: $(INSTALLED) ## Install the project and its tools into .venv (a no-op when up to date)

$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --python $(BIN)/python -e '.[dev,bench]'
	touch $@

demo: $(INSTALLED) ## Compare layer_swap with static on a real model (CPU, under 10 minutes)
	$(BIN)/sglang-morph demo $(DEMO_ARGS)

record: demo ## Run the demo, keep its numbers in benchmarks/results and in README.md
	$(BIN)/python -m benchmarks.record_demo demo/results.json
	$(BIN)/python -m benchmarks.readme_table

test: $(INSTALLED) ## Run all tests, those that start servers last
	$(BIN)/python -m pytest $(TEST_ARGS) $(filter-out tests/server tests/__pycache__,$(patsubst %/,%,$(sort $(wildcard tests/*/)))) $(wildcard tests/server)

lint: $(INSTALLED) ## Check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
