# Everything runs from .venv, which `make install` creates and every target brings up to date.
SEED ?= 0
PY := .venv/bin/python
PYTEST := $(PY) -m pytest

.DEFAULT_GOAL := help
.PHONY: help install lock protos protos-check docs lint format types imports deploy-check unit contract e2e chaos
.PHONY: test demo clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: ## Create .venv with the full CPU stack (instant when nothing changed)
	@scripts/install.sh

lock: install ## Pin requirements/*.in into requirements/*.txt
	@scripts/lock.sh

protos: install ## Regenerate the contract's code; refuses a breaking change (ACCEPT_BREAKING=1 takes it)
	@$(PY) -m scripts.protos generate $(if $(ACCEPT_BREAKING),--accept-breaking)

protos-check: install ## Fail when the generated code is stale or the contract was broken
	@$(PY) -m scripts.protos check

docs: install ## Rewrite what is made from the code: the table of recipe keys, the dashboards
	@$(PY) -m scripts.recipe_reference write
	@$(PY) -m scripts.dashboards write

lint: install ## Style
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .

format: install ## Rewrite to the house style
	@.venv/bin/ruff check --fix .
	@.venv/bin/ruff format .

types: install ## Strict type checks
	@.venv/bin/mypy

imports: install ## The rules of the rooms
	@.venv/bin/lint-imports

deploy-check: install ## Dockerfiles, compose files and scripts: lint, schema, names
	@.venv/bin/hadolint deploy/docker/*.Dockerfile
	@.venv/bin/shellcheck scripts/*.sh .ci/run
	@$(PY) -m scripts.compose check

unit: install ## Tests of single parts
	@$(PYTEST) tests/unit

contract: install protos-check ## Tests of the services' contracts
	@$(PYTEST) tests/contract

e2e: install ## Whole runs with the real engine and the real Redis
	@$(PYTEST) tests/e2e

chaos: install ## Runs in which processes are killed
	@$(PYTEST) tests/chaos

test: lint types imports protos-check deploy-check ## Everything: style, types, import rules, deployment, all tests without a GPU
	@$(PYTEST) tests/unit tests/contract tests/e2e

demo: ## Train a small model through every service and show what it learned (ASYNC=1: one step ahead)
	@SEED=$(SEED) ASYNC=$(ASYNC) scripts/demo.sh

clean: ## Remove what was built (not .venv)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
