PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: install run quickstart lint test bench docs clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

run: install
	$(BIN)/python -m esper.run +experiment=cifar_ppo

quickstart: install
	$(BIN)/python -m esper.run +experiment=quickstart

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest --numprocesses 2

bench: install
	$(BIN)/python benchmarks/engine.py --repeats 1
	$(BIN)/python benchmarks/telemetry.py

docs: install
	$(BIN)/python -m mkdocs build --strict --quiet --site-dir site
	@echo "site/index.html"

clean:
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache .hypothesis
