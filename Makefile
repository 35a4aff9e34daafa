# `make` lists the targets. Requires Python 3.11 or newer; PYTHON=python3.12 selects another interpreter.

PYTHON ?= python3
WORKERS ?= auto
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check -qq install -c constraints.txt
PYTEST := $(RUN) -m pytest -n $(WORKERS) --maxprocesses=4 --dist=worksteal

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint format clean chromium

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.installed ## train a ViT on handwritten digits, with and without position embeddings, and write a report
	$(VENV)/bin/vitrail train

test: lint chromium ## lint, type checks and all fast tests
	$(PYTEST)

test-all: lint chromium ## also the slow tests, and the GPU tests if there is a GPU
	$(PYTEST) -m "not network"

lint: $(VENV)/.installed-dev ## ruff and mypy
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy

# The explorer page is tested in a real browser, if one is installed.
chromium:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && echo "Installing Chromium for the tests of the explorer page." && \
	    apt-get -qq update >/dev/null && DEBIAN_FRONTEND=noninteractive apt-get -qq -y install chromium >/dev/null; } || \
	  echo "Chromium is not installed, so the explorer page is not tested (on Debian: apt install chromium)."

format: $(VENV)/.installed-dev ## format the code
	$(RUN) -m ruff check --fix-only
	$(RUN) -m ruff format

clean: ## remove caches and builds, but not .venv
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Installed once, and again when the dependencies change. A new interpreter makes both stamps out of date.
$(VENV)/.installed: pyproject.toml constraints.txt $(RUN)
	@echo "Installing vitrail into $(VENV); the first time this takes a few minutes."
	@$(PIP) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt $(RUN)
	@echo "Installing vitrail and its test dependencies into $(VENV); the first time this takes a few minutes."
	@$(PIP) -e '.[dev,fast]'
	@touch $(VENV)/.installed $@

$(RUN):
	@command -v $(PYTHON) >/dev/null || \
	  { echo "The command '$(PYTHON)' was not found; vitrail needs Python 3.11 or newer: try make PYTHON=python3.12." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "vitrail needs Python 3.11 or newer and '$(PYTHON)' is $$($(PYTHON) -V 2>&1 | head -n 1); try make PYTHON=python3.12." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "'$(PYTHON)' has no venv module; install it first (on Debian and Ubuntu: apt install python3-venv)." >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); exit 1; }
