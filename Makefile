# One environment, .venv, serves every target; what is installed follows pyproject.toml and constraints.txt.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST_ARGS ?=
# Most tests wait for processes or a browser most of the time. A file's tests share what it starts and stay together; the
# files stay in their order, so that the long ones come first. No more than two: some tests mind how soon things happen.
SIDE_BY_SIDE := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: help demo test lab screenshots bench lint constraints clean

help: ## say what there is
	@sed -nE 's/^([a-z]+):[^#]*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20
	@echo "PYTHON=… chooses the interpreter (3.11 or newer), PYTEST_ARGS=… goes to pytest."

demo: $(STAMP) ## train on 2 ranks, watched in this terminal, in a pool that ends with it
	@$(BIN)/python notebooks/demo.py

test: $(STAMP) ## lint, type check and all tests; what they need of Debian (Chromium, nft) is installed if need be
	@bash .ci/install-tools
	@$(MAKE) --no-print-directory lint
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(PYTEST_ARGS)

lab: $(STAMP) ## open JupyterLab on notebooks/
	@$(BIN)/jupyter lab --ServerApp.root_dir=notebooks $(if $(filter 0,$(shell id -u)),--allow-root)

screenshots: $(STAMP) ## make pictures of all panels in all states in screenshots/ (about 5 minutes)
	@$(BIN)/python tests/browser/screenshots.py

bench: $(STAMP) ## run the benchmarks and print their tables (about 10 minutes)
	@$(BIN)/python tests/bench/run.py

lint: $(STAMP) ## ruff's checks and format, mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

constraints: ## resolve everything anew and write constraints.txt; run the tests before you commit it
	@bash .ci/constraints "$(PYTHON)"

clean: ## remove what the targets made: the environment, the demo's records, caches
	@if [ -x $(BIN)/dtrain ] && [ -d .demo ]; then DTRAIN_HOME=.demo $(BIN)/dtrain down --quiet || true; fi
	@rm -rf $(VENV) .demo build dist screenshots .pytest_cache .hypothesis .mypy_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@if ! $(BIN)/python -c '' 2>/dev/null; then \
	    python=$$(bash .ci/find-python "$(PYTHON)"); \
	    echo "making $(VENV) with $$python"; \
	    "$$python" -m venv --clear $(VENV); \
	fi
	@echo "installing; the first time takes some minutes"
	@$(BIN)/python -m pip install -qq -c constraints.txt -e '.[test]'
	@touch $@
