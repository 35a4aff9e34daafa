# `make` says what there is. Needs Python 3.11 or newer and nothing else; choose another with PYTHON=python3.12.

PYTHON ?= python3
WORKERS ?= auto
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check -qq install -c constraints.txt
PYTEST := $(RUN) -m pytest -n $(WORKERS) --maxprocesses=4 --dist=worksteal

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint format clean chromium

help: ## say this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.installed ## train a ViT on handwritten digits, with and without positions, and report
	$(VENV)/bin/vitrail train

test: lint chromium ## lint, types and every test that is not slow
	$(PYTEST)

test-all: lint chromium ## the slow tests too, and those for a GPU where there is one
	$(PYTEST) -m "not network"

lint: $(VENV)/.installed-dev ## ruff and mypy
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy

# The explorer's page is tested in a real browser, where there is one.
chromium:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && echo "Installing Chromium, for the tests of the page." && \
	    apt-get -qq update >/dev/null && DEBIAN_FRONTEND=noninteractive apt-get -qq -y install chromium >/dev/null; } || \
	  echo "There is no Chromium, so the page is not tested; install it first (on Debian: apt install chromium)."

format: $(VENV)/.installed-dev ## put the code into shape
	$(RUN) -m ruff check --fix-only
	$(RUN) -m ruff format

clean: ## remove caches and builds; the environment stays (rm -rf .venv)
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Installed once, and again when the dependencies change. A new interpreter makes both stamps old.
$(VENV)/.installed: pyproject.toml constraints.txt $(RUN)
	@echo "Installing vitrail into $(VENV); the first time this takes a few minutes."
	@$(PIP) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt $(RUN)
	@echo "Installing vitrail and what its tests need into $(VENV); the first time this takes a few minutes."
	@$(PIP) -e '.[dev,fast]'
	@touch $(VENV)/.installed $@

$(RUN):
	@command -v $(PYTHON) >/dev/null || \
	  { echo "There is no command '$(PYTHON)'; vitrail needs Python 3.11 or newer: try make PYTHON=python3.12." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "vitrail needs Python 3.11 or newer and '$(PYTHON)' is $$($(PYTHON) -V 2>&1 | head -n 1); try make PYTHON=python3.12." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "'$(PYTHON)' has no venv module; install it first (on Debian and Ubuntu: apt install python3-venv)." >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); exit 1; }
