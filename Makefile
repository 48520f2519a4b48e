# Needs Python 3.11 or newer and a package index; everything it installs goes into .venv.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
DEV := $(VENV)/.dev-installed
PEERS := $(VENV)/.peers-installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-peers lint format types docs-check bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(DEV) ## create .venv and install ckpttool with its development tools
	@:

demo: $(DEV) ## reshard a small checkpoint from tp 8 to tp 2, look at it, and compare
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash scripts/demo.sh

test: $(DEV) ## run every test that needs no other library to judge (the pages in docs/ included)
	@$(BIN)/python -m pytest $(ARGS)

test-peers: $(PEERS) ## let the libraries that read these formats judge what ckpttool writes
	@$(BIN)/python -m pytest tests/peers $(ARGS)

docs-check: $(DEV) ## run every command and example of README.md and docs/, check links and the reference
	@$(BIN)/python -m pytest tests/docs $(ARGS)

lint: $(DEV) ## check style and formatting
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

format: $(DEV) ## rewrite the files the way `make lint` wants them, where that is safe
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

types: $(DEV) ## check types
	@$(BIN)/mypy --strict

bench: $(DEV) ## measure speed and memory against cp, and merges against mergekit (minutes; about 40 GB of disk)
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python bench/run.py $(ARGS)
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python bench/merge.py $(MERGE_ARGS)

clean: ## remove .venv, build outputs and caches
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps make a second call instant. pip skips what is there already, so a new pin installs only what changed.
$(DEV): pyproject.toml constraints.txt
	@python=; \
	for candidate in $(PYTHON) python3.11 python3.12 python3.13 python3.14 python3; do \
	  if "$$candidate" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    python=$$candidate; break; \
	  fi; \
	done; \
	if [ -z "$$python" ]; then \
	  printf 'error: no Python 3.11 or newer with ensurepip on PATH\n\nhint: install one, or name it: make setup PYTHON=...\n' >&2; \
	  exit 1; \
	fi; \
	"$$python" -m venv $(VENV)
	@echo 'installing ckpttool and its development tools into $(VENV) (torch is the large one)'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(PEERS): $(DEV)
	@echo 'installing the peers into $(VENV)'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[peers]'
	@touch $@
