# Everything runs from .venv, which is built once and again only when pyproject.toml or constraints.txt change.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: help demo test test-deploy test-browser test-faults check format docs bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[.a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.venv: $(READY) ## build the environment (PYTHON=python3.12 to choose the interpreter)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null || { \
	  found=$$($(PYTHON) --version 2> /dev/null) || found="not to be found"; \
	  echo "fedfill needs Python 3.11 or newer, but '$(PYTHON)' is $$found; name another one with 'make PYTHON=...'." >&2; \
	  exit 1; }
	@echo "Installing fedfill and its tools into .venv (2 to 5 minutes the first time, mostly PyTorch's download) ..."
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
	@echo "Done. 'source .venv/bin/activate' once in each terminal, then 'fedfill --help'."

demo: $(READY) ## compare one round of fed3r with FedAvg on ten unequal clients
	$(BIN)/fedfill compare fedavg fedavg:head=ccvr fed3r local \
	  --data digits --clients 10 --partition dirichlet:0.1 --rounds 20 --seeds 0,1,2 --set batch_size=16 --out runs/demo

test: $(READY) ## run the tests, in three processes
	$(BIN)/pytest -q -n 3 --dist worksteal -m 'not deploy and not faults and not browser'

test-deploy: $(READY) ## run whole Flower federations of real processes and compare the bits
	$(BIN)/pytest -q -m deploy

test-browser: $(READY) ## open reports in Chromium, which has to be installed: requests, keys, contrast, axe's rules
	$(BIN)/pytest -q -m browser

test-faults: $(READY) ## kill, stop, starve and mislead Flower federations of real processes (half an hour)
	$(BIN)/pytest -q -m faults

check: $(READY) ## formatting, lint, types, the direction of imports, docstrings
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pydoclint --quiet src/fedfill

format: $(READY) ## format the code, mend what ruff can mend, and write what editors know of the settings
	$(BIN)/python tools/options.py
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

docs: $(READY) ## build the site into build/docs; nothing is fetched, and a warning is an error
	$(BIN)/sphinx-build -q -E -W --keep-going -j 2 -c docs . build/docs
	@echo "Open build/docs/index.html"

bench: $(READY) ## time fedfill against bare PyTorch loops
	$(BIN)/python bench/run.py

clean: ## remove the environment, caches and builds; runs/ stays
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
