# An index: what can be done here. Every target works from a bare clone.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
# The release that the fixtures were made and the tests were run with; any torch >= 2.8 should do.
TORCH  ?= torch==2.13.0
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check
DEMO   := demo
PROMPT ?= "def parse_args(argv):"

.PHONY: help build demo test test-full test-gpu lint bench bench-quantize bench-attention count-kernel clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:[^#]*## /\t/' | column -t -s '	'

# Installs once, and again only when what is installed changes.
INSTALLED := $(VENV)/installed
$(INSTALLED): pyproject.toml $(shell find cpp plugins -type f 2>/dev/null)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	$(PIP) --editable '.[dev]'
	touch $@

build: $(INSTALLED)  ## create .venv and install the package into it, editable, with its C++ module

# The fixtures are so small that a second thread costs more than it brings.
demo: export OMP_NUM_THREADS = 1
demo: build  ## fixture checkpoint -> engine directory -> text, next to plain decoding
	$(BIN)/dflash-trt build tests/fixtures/tiny-gpt-oss-dflash --target tests/fixtures/tiny-gpt-oss -o $(DEMO) --force
	$(BIN)/dflash-trt generate $(DEMO) --target tests/fixtures/tiny-gpt-oss --baseline --max-tokens 96 $(PROMPT)

test: build  ## everything that needs no GPU
	$(BIN)/python -m pytest

test-full: build  ## `make test` and the slow checks
	$(BIN)/python -m pytest -m 'not gpu'

test-gpu: build  ## the kernels on this machine's GPU; compiles them first
	$(PIP) --no-deps --editable . -C cmake.define.DFLASH_CUDA=ON
	$(BIN)/python -m pytest -m gpu -rs tests/gpu

lint: build  ## ruff and mypy
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

bench: build  ## measure decoding on this machine; prints tables, asserts nothing
	$(BIN)/python benchmarks/bench_decode.py

bench-quantize: build  ## measure the packers on the shapes of gpt-oss-120b's drafter
	$(BIN)/python benchmarks/bench_quantize.py

bench-attention: build  ## measure the attention kernel, torch's and a copy; needs a GPU, and `make test-gpu` before
	$(BIN)/python benchmarks/bench_kv_injection_attention.py

count-kernel: build  ## count the attention kernel's machine instructions; needs nvcc, no GPU
	$(PIP) --editable '.[sass]' && $(BIN)/python benchmarks/count_kernel.py

clean:  ## remove what the targets made
	rm -rf $(VENV) $(DEMO) build .mypy_cache .ruff_cache .pytest_cache .hypothesis
