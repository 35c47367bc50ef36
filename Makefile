# `make train` and `make test` do all the set-up on a fresh machine with Python >= 3.10, pip and git.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Tests run their tensor work on one thread each: two threads on a busy machine are slower than one.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.PHONY: train test test-slow lint format setup setup-dev bench clean

train: setup ## train a small model on the bundled sample and show its text
	$(BIN)/python train_pretrain.py --config configs/quickstart.yaml --overwrite 1

test: setup-dev ## the test suite, under ten minutes on two cores
	$(TEST_ENV) $(BIN)/python -m pytest

test-slow: setup-dev ## the long tests that `make test` leaves out
	$(TEST_ENV) $(BIN)/python -m pytest -m slow

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## one Markdown table of speed on this machine
	$(BIN)/python scripts/benchmark.py

setup: $(VENV)/.installed
setup-dev: $(VENV)/.installed-dev

$(VENV)/.installed: requirements.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt -r requirements-dev.txt
	touch $@

clean: ## remove the environment and what tools leave behind; runs in checkpoints/ stay
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis
