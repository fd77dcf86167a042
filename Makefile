# `make test` and `make demo` need Python, pip and a C compiler, and nothing else: they make .venv themselves.
# `make help` lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help arena install test lint types pytest soak day test-gpu demo simulate bench-host bench-core bench-scale format clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(INSTALLED): pyproject.toml setup.py $(wildcard csrc/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

arena: ## the C library alone, where it is loaded from; needs nothing but a C compiler
	$(CC) -std=c11 -O2 -fPIC -shared -fvisibility=hidden -Wall -Wextra -Werror \
		-o src/salus/client/_arena.so csrc/*.c -ldl -lpthread

install: $(INSTALLED) ## make .venv with everything in it

test: lint types pytest ## lint, check types, run all tests

lint: $(INSTALLED) ## ruff, lint and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED) ## mypy, strict
	$(BIN)/mypy

pytest: $(INSTALLED) ## the tests alone
	$(BIN)/python -m pytest -n auto

soak: $(INSTALLED) ## a thousand random kills of jobs and of the service, under load
	$(BIN)/python -m tests.faults.soak --kills 1000

day: $(INSTALLED) ## a day of use: 200 jobs of every kind, cancelled, paused, restarted; then all books must agree
	$(BIN)/python -m tests.faults.day --jobs 200

test-gpu: ## the GPU suite, with the Python that has torch: make test-gpu PYTHON=...; writes benchmarks/results/gpu.json
	$(MAKE) arena
	PYTHONPATH=src $(PYTHON) -m tests.gpu.run --out benchmarks/results/gpu.json

demo: $(INSTALLED) ## four real training jobs under three policies; writes timelines to build/
	$(BIN)/salus demo --out build

simulate: $(INSTALLED) ## compare the policies on 100 simulated jobs; writes a plot and a timeline to build/
	mkdir -p build
	$(BIN)/salus simulate --generate 100 --seed 1 --policy fifo,srtf,pack,fair --memory 16GiB \
		--plot build/simulated.png --timeline build/simulated.html

bench-host: $(INSTALLED) ## switching, a crowd, shares on the CPU; writes benchmarks/results/host-*.json
	for name in switch crowd sharing arena; do $(BIN)/salus bench $$name --out benchmarks/results/host-$$name.json || exit 1; done

bench-core: $(INSTALLED) ## the cost of one decision; writes benchmarks/results/core.json
	$(BIN)/python benchmarks/core.py --out benchmarks/results/core.json

bench-scale: $(INSTALLED) ## 10,000 and 100,000 jobs on 64 simulated GPUs; writes benchmarks/results/scale.json
	$(BIN)/python benchmarks/scale.py --out benchmarks/results/scale.json

format: $(INSTALLED) ## put the code into the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove what was built
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
