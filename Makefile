PYTHON ?= python3
VENV ?= .venv
EXTRA ?= dev
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := $(VENV)/.torch

# Where there is a compiler the kernels must build: a broken C++ file is an error, not a slower package.
ifneq ($(shell command -v g++ 2>/dev/null),)
export FASTWEIGHTS_REQUIRE_KERNELS := 1
endif
# Idle OpenMP threads sleep instead of spinning, so that two of them never fight for a core.
export OMP_WAIT_POLICY ?= PASSIVE

# Several processes test at once, each on one thread unless a test asks for more: a fifth less work than on all cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8
DEFAULT := -m "not slow and not data and not gpu"

.PHONY: help reproduce test test-slow test-data test-levels lint format docs page wheels test-wheels bench clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 12

# torch first and pinned, so that nothing else chooses a build of it.
$(TORCH): constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch numpy
	@touch $@

# A file that has become a package has to be installed again: the editable install remembers where it was.
# pip says nothing for as long as it works, so say beforehand what is coming.
$(STAMP): $(TORCH) pyproject.toml CMakeLists.txt $(wildcard csrc/*) $(shell find src -name __init__.py)
	@echo "Installing fastweights and compiling its kernels: about a minute on two cores, after all downloads"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$(EXTRA)]'
	@touch $@

reproduce: $(STAMP)  ## train the first table: associative retrieval of Ba et al. 2016, R = 50
	$(BIN)/fastweights reproduce ba2016/associative-retrieval --workers 2

test: $(STAMP)  ## the default tests: offline, a few minutes
	$(PYTEST) $(DEFAULT)

test-slow: $(STAMP)  ## the tests that take minutes or need data sets
	$(PYTEST) -m "slow or data"

test-data: $(STAMP)  ## the tests of real data alone, in the folder that FASTWEIGHTS_DATA names
	$(PYTEST) -m data

# Other processors, played by settings. Each library asks the processor for itself: our kernels, PyTorch's own (ATen),
# MKL's matrix products and oneDNN's convolutions and LSTM. They depend on one another nowhere, so two passes show what
# one pass for every setting shows: a processor with AVX2 and no AVX-512, and the lowest that each library knows.
# (PyTorch believes oneDNN alone about bfloat16, so a mixture is a processor too.) The first is left out on a processor
# that has no AVX-512: the default tests are that pass. It leaves out the experiments, which the other pass runs through
# the same layers. Left out of both are the folders that compute little, Triton's interpreter, which is NumPy, and what a
# processor does not change: runs that are killed and settings that are refused.
AVX2 := FASTWEIGHTS_CPU_LEVEL=x86-64-v3 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2
LOWEST := FASTWEIGHTS_CPU_LEVEL=baseline ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE
SENSITIVE := tests/ops tests/nn --ignore-glob='*/test_triton.py' \
	-k "not killed and not refused and not help and not finished and not compiled and not signatures"

test-levels: $(STAMP)  ## the tests of what computes, as on older processors
	if grep -q avx512f /proc/cpuinfo; then $(AVX2) $(PYTEST) $(DEFAULT) $(SENSITIVE); fi
	$(LOWEST) $(PYTEST) $(DEFAULT) $(SENSITIVE) tests/reproduce

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## let ruff write the layout
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)  ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Whatever is not ours of the page, and what is large, is built, and not in git. mkdocs copies it where it is.
ONNXRUNTIME := onnxruntime-web-1.30.0
BUILT := docs/play/built

page: $(STAMP)  ## build the page to play with, docs/play, which then works without a net (needs npm)
	mkdir -p build $(BUILT)
	npm pack --silent --pack-destination build $(subst web-,web@,$(ONNXRUNTIME))
	tar -xzf build/$(ONNXRUNTIME).tgz -C $(BUILT) --strip-components=2 \
		package/dist/ort.wasm.bundle.min.mjs package/dist/ort-wasm-simd-threaded.wasm
	$(BIN)/python -m pip install --quiet --constraint constraints.txt playwright
	$(BIN)/python docs/play/export.py

# The platforms of the wheels, as zig calls them, and their tags.
PLATFORMS := x86_64-linux-gnu.2.28=manylinux_2_28_x86_64 aarch64-linux-gnu.2.28=manylinux_2_28_aarch64 \
	x86_64-linux-musl=musllinux_1_2_x86_64 aarch64-macos.11.0=macosx_11_0_arm64 x86_64-windows-gnu=win_amd64
# One compiler for all of them, which is a Python package; auditwheel and lief look at what came out.
WHEEL_TOOLS := $(VENV)/.wheel-tools

$(WHEEL_TOOLS): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt auditwheel lief wheel ziglang
	@touch $@

wheels: $(WHEEL_TOOLS)  ## build the wheels of all platforms into dist/
	rm -rf dist
	set -e; \
	export ZIG=$$($(BIN)/python -c 'import ziglang; print(ziglang.__path__[0] + "/zig")') \
		CMAKE_ARGS=-DCMAKE_TOOLCHAIN_FILE=$(CURDIR)/csrc/zig.cmake FASTWEIGHTS_REQUIRE_KERNELS=1; \
	for platform in $(PLATFORMS); do \
		export ZIG_TARGET=$${platform%=*}; \
		PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist \
			--config-settings build-dir=build/$$ZIG_TARGET .; \
		$(BIN)/python -m wheel tags --remove --platform-tag $${platform#*=} dist/*-none-linux_*.whl; \
	done

test-wheels: $(WHEEL_TOOLS)  ## test the wheels in dist/, with qemu-aarch64, musl and wine where they are installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/wheels

bench: $(STAMP)  ## time layers and memories against eager PyTorch and torch.nn
	$(BIN)/fastweights bench associative
	$(BIN)/fastweights bench gated --no-compile
	$(BIN)/fastweights bench delta
	$(BIN)/fastweights bench delta-rnn
	$(BIN)/fastweights bench gated-models
	$(BIN)/fastweights bench hebbian-softmax
	$(BIN)/fastweights bench mbpa
	$(BIN)/fastweights bench cache
	$(BIN)/fastweights bench language

clean:  ## remove the environment and everything that was built
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache
