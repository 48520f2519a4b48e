# Needs Python 3.11 or newer and a package index; everything it installs goes into .venv, the plain install of the demo into
# .venv-demo, and Paddle, which needs other versions of nearly everything, into .venv-paddle.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
DEMO_VENV := .venv-demo
DEMO := $(DEMO_VENV)/.installed
DEV := $(VENV)/.dev-installed
PEERS := $(VENV)/.peers-installed
CLUSTER := $(VENV)/.cluster-installed
FUZZ := $(VENV)/.fuzz-installed
PACKAGE := $(VENV)/.package-installed
PADDLE_VENV := .venv-paddle
PADDLE := $(PADDLE_VENV)/.installed
NODE_PEERS := .node-peers/.installed
BROWSER := $(VENV)/.browser-installed
SITE := $(VENV)/.site-installed
# The tests start hundreds of Pythons, and pytest rewrites its asserts: without bytecode files each start does it anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-peers test-browser test-cluster test-resume test-families test-package lint format types docs-check site torture torture-remote walk fuzz bench bench-scale bench-cluster clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(DEV) ## create .venv and install ckpttool with its development tools
	@:

demo: $(DEMO) ## reshard a small checkpoint from tp 8 to tp 2, look at it, and compare; installs ckpttool alone, without torch
	@PATH="$(CURDIR)/$(DEMO_VENV)/bin:$$PATH" bash scripts/demo.sh

test: $(DEV) ## run the tests that need no other library to judge: of many cases that do the same, a few
	@$(BIN)/python -m pytest -n auto --maxprocesses 8 $(ARGS)

test-all: $(DEV) ## run them with every case and every page of docs/, and more examples of every property
	@$(BIN)/python -m pytest -n auto --maxprocesses 8 --all $(ARGS)

test-peers: $(PEERS) $(PADDLE) $(NODE_PEERS) ## let the libraries that read these formats judge what ckpttool writes
	@CKPTTOOL_PADDLE_PYTHON='$(CURDIR)/$(PADDLE_VENV)/bin/python' CKPTTOOL_AZURITE='$(CURDIR)/.node-peers/node_modules/.bin/azurite-blob' \
	  CKPTTOOL_GITLAB_CI_LOCAL='$(CURDIR)/.node-peers/node_modules/.bin/gitlab-ci-local' \
	  $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile tests/peers $(ARGS)

test-browser: $(BROWSER) ## look at the reports, the README and the site in Chromium (apt-get install chromium; minutes)
	@$(BIN)/python -m pytest tests/browser $(ARGS)

test-cluster: $(CLUSTER) ## run on many machines: Ray, Slurm, MPI and torchrun, all of them on this one (minutes)
	@$(BIN)/python -m pytest tests/cluster $(ARGS)

test-resume: $(PEERS) $(PADDLE) ## move training runs between all frameworks, and check docs/resume.md (10 minutes; ARGS=--write)
	@CKPTTOOL_PADDLE_PYTHON='$(CURDIR)/$(PADDLE_VENV)/bin/python' $(BIN)/python -m tests.peers.resume $(ARGS)

docs-check: $(DEV) ## run every command and example of README.md and docs/, check links and the reference
	@$(BIN)/python -m pytest -n auto --maxprocesses 8 --all tests/docs $(ARGS)

site: $(SITE) ## build the site of README.md and docs/ into build/site: open its index.html (seconds)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet $(ARGS)
	@echo 'build/site/index.html'

torture: $(DEV) ## kill, fail and starve every command at each of its system calls, and see what is left (minutes)
	@$(BIN)/python -m tests.torture $(ARGS)

torture-remote: $(DEV) ## fail every request of commands that write to S3, once in each way, and see what is left (an hour; ARGS)
	@$(BIN)/python -m tests.torture.remote $(ARGS)

walk: $(DEV) ## write unusual models of every family in random chains of formats, judged from outside (20 minutes; ARGS)
	@$(BIN)/python -m tests.walk $(ARGS)

fuzz: $(FUZZ) ## damage every structure of every format, and let coverage guide more of it (an hour; FUZZ_ARGS, GUIDED_ARGS)
	@$(BIN)/python -m pytest -q tests/fuzz/test_guided.py
	@$(BIN)/python -m tests.fuzz.campaign $(FUZZ_ARGS)
	@$(BIN)/python -m tests.fuzz.guided --corpus build/fuzz $(GUIDED_ARGS)

test-families: $(PEERS) ## make every architecture of transformers tiny, cut it, and write docs/families.md (5 minutes; ARGS)
	@$(BIN)/python -m tests.peers.families --jobs 2 --page docs/families.md $(ARGS)

test-package: $(PACKAGE) ## install wheel and sdist with the lowest and the newest dependencies, on each Python here, and use them (10 minutes)
	@$(BIN)/python -m tests.package

lint: $(DEV) ## check style and formatting
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

format: $(DEV) ## rewrite the files the way `make lint` wants them, where that is safe
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

types: $(DEV) ## check types
	@$(BIN)/mypy --strict

bench: $(PEERS) $(PADDLE) ## measure speed and memory beside cp, torch, DeepSpeed, megatron-core, mergekit and Paddle (45 minutes, 60 GB of disk; ARGS=--quick: 2, 2 GB)
	@$(BIN)/python -m bench $(ARGS)

bench-scale: $(DEV) ## measure how planning and inspecting grow with tensors and ranks (20 minutes, 1 GB of disk)
	@$(BIN)/python bench/scale.py $(ARGS)

bench-cluster: $(DEV) ## measure how runs on a Ray cluster and in parts scale, with a slow link for each machine (5 minutes, 4 GB of memory)
	@$(BIN)/python -m bench.cluster $(ARGS)

clean: ## remove .venv, .venv-demo, .venv-paddle, build outputs and caches
	rm -rf $(VENV) $(DEMO_VENV) $(PADDLE_VENV) .node-peers build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps make a second call instant. pip skips what is there already, so a new pin installs only what changed.
# --no-compile: of 20,000 modules of others a few thousand are ever imported, and Python keeps what it compiles then.
define make_venv
python=; \
for candidate in $(PYTHON) python3.11 python3.12 python3.13 python3.14 python3; do \
  if "$$candidate" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
    python=$$candidate; break; \
  fi; \
done; \
if [ -z "$$python" ]; then \
  printf 'error: no Python 3.11 or newer with ensurepip on PATH\n\nhint: install one, or name it: make $(MAKECMDGOALS) PYTHON=...\n' >&2; \
  exit 1; \
fi; \
"$$python" -m venv
endef

$(DEV): pyproject.toml constraints.txt
	@$(make_venv) $(VENV)
	@echo 'installing ckpttool and its development tools into $(VENV) (torch is the large one)'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	@touch $@

$(DEMO): pyproject.toml constraints.txt
	@$(make_venv) $(DEMO_VENV)
	@echo 'installing ckpttool into $(DEMO_VENV) (33 MB to download)'
	@$(DEMO_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e .
	@touch $@

$(PEERS): $(DEV)
	@echo 'installing the peers into $(VENV)'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[peers]'
	@touch $@

# Slurm and MPI are the system's: apt-get install slurmctld slurmd slurm-client openmpi-bin. Without them their tests are skipped.
$(CLUSTER): $(PEERS)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[ray]'
	@touch $@

$(BROWSER): $(DEV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[browser]'
	@touch $@

$(PACKAGE): $(DEV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[package]'
	@touch $@

$(SITE): $(DEV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[site]'
	@touch $@

$(FUZZ): $(DEV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[fuzz]'
	@touch $@

# Microsoft's server of Azure's storage and a runner of GitLab's jobs are on npm only. Without npm their tests are skipped.
$(NODE_PEERS):
	@mkdir -p $(@D)
	@if command -v npm >/dev/null; then npm install --silent --no-audit --no-fund --prefix $(@D) azurite@3.35.0 gitlab-ci-local@4.65.0; \
	else echo 'no npm: tests against Azurite and of the GitLab template are skipped'; fi
	@touch $@

# Begun anew when a pin changes: `pip install --target` replaces nothing, and no resolver looks at either list.
$(PADDLE): constraints-paddle.txt constraints-paddle-old.txt | $(DEV)
	@echo 'installing Paddle into $(PADDLE_VENV) (about 200 MB to load, 1.5 GB on disk)'
	@$(BIN)/python -m venv --clear $(PADDLE_VENV)
	@install="$(PADDLE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps"; \
	$$install -r constraints-paddle.txt && $$install --target $(PADDLE_VENV)/older -r constraints-paddle-old.txt
	@touch $@
