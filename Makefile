# Two commands on a fresh machine: `make demo` trains a small model on two ranks, `make test` checks everything.
# Both make .venv first, and again when what it was made from has changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CONFIG ?= configs/tiny_cpu.yaml

# One thread a process: the tests and the demo start several processes, which would fight for the cores.
export OMP_NUM_THREADS ?= 1

CSRC := $(sort $(foreach kind,cpp cu cuh h,$(wildcard csrc/*/*.$(kind))))
NVCC := $(firstword $(wildcard $(CUDA_HOME)/bin/nvcc) $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
ARCHS := sm_80 sm_90a sm_100a

# Tests marked slow stay out, but for slow(ci=True) where CI is set.
TESTS := not slow$(if $(CI), or slow(ci=True))
TEST_SECS := 2400

# The GPU targets run in .venv, or in a Python that already has everything: make test-gpu GPU_PYTHON=python3.
GPU_PYTHON ?= $(BIN)/python
GPU_NEEDS = $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(STAMP))

.PHONY: help demo test lint types csrc-check csrc-objects csrc-nvshmem unit format clean test-gpu bench-gpu sanitize-gpu gpu-build
.DEFAULT_GOAL := help

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | awk -F '\t' '{printf "make %-12s %s\n", $$1, $$2}'

demo: $(STAMP) ## train a small MoE language model on two ranks of this machine (CONFIG=... for another)
	$(BIN)/torchrun --standalone --nproc-per-node 2 examples/pretrain.py --config $(CONFIG)

test: $(STAMP) ## lint, types, compile of the kernels, tests
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory types
	@$(MAKE) --no-print-directory csrc-check
	@$(MAKE) --no-print-directory unit

lint: $(STAMP) ## style of Python and C++
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CSRC)

types: $(STAMP) ## mypy --strict over the package
	$(BIN)/mypy

unit: $(STAMP) ## the tests alone
	$(BIN)/python -m pytest -m "$(TESTS)" --session-timeout=$(TEST_SECS)

format: $(STAMP) ## rewrite Python and C++ in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CSRC)

csrc-check: $(STAMP) ## compile csrc for every GPU architecture with warnings as errors, where nvcc exists
ifeq ($(NVCC),)
	@echo "csrc-check: left out, because no nvcc was found"
else
	@$(MAKE) --no-print-directory --jobs=$$(getconf _NPROCESSORS_ONLN) csrc-objects
	@echo "csrc-check: csrc compiles for $(ARCHS)"
	@nvshmem=$$($(BIN)/python scripts/nvshmem_home.py); \
	if [ -n "$$nvshmem" ]; then \
	  $(MAKE) --no-print-directory csrc-nvshmem NVSHMEM=$$nvshmem \
	  && echo "csrc-check: csrc/nvshmem compiles and links with $$nvshmem for $(ARCHS)"; \
	else \
	  echo "csrc-check: csrc/nvshmem left out, because NVSHMEM's wheel is not installed (nvidia-nvshmem-cu13)"; \
	fi
endif

NVCC_FLAGS := -std=c++17 -O3 -Icsrc -Xcompiler=-fPIC,-Wall,-Wextra -Werror=all-warnings
SOURCES := $(filter-out csrc/nvshmem/%,$(CSRC))
KERNELS := $(patsubst csrc/%.cu,%.o,$(filter %.cu,$(SOURCES)))
BINDINGS := $(patsubst csrc/%.cpp,build/csrc/host/%.o,$(filter %.cpp,$(SOURCES)))

csrc-objects: $(BINDINGS) $(foreach arch,$(ARCHS),$(addprefix build/csrc/$(arch)/,$(KERNELS)))

build/csrc/host/%.o: csrc/%.cpp $(CSRC) Makefile
	@mkdir -p $(@D)
	$(NVCC) $(NVCC_FLAGS) $$($(BIN)/python -m pybind11 --includes) -DMOE_EP_CUDA_ARCHS=none -c $< -o $@

define kernel_rule
build/csrc/$(1)/%.o: csrc/%.cu $$(CSRC) Makefile
	@mkdir -p $$(@D)
	$$(NVCC) $$(NVCC_FLAGS) -arch=$(1) -c $$< -o $$@
endef
$(foreach arch,$(ARCHS),$(eval $(call kernel_rule,$(arch))))

# The rails over NVSHMEM as one extension for all architectures, linked with the device library of its wheel.
NVSHMEM_SOURCES := csrc/internode/rail.cpp csrc/low_latency/memory.cpp $(wildcard csrc/nvshmem/*.c*)
csrc-nvshmem: build/csrc/nvshmem/_C_nvshmem.so

build/csrc/nvshmem/_C_nvshmem.so: $(CSRC) Makefile
	@mkdir -p $(@D)
	$(NVCC) $(NVCC_FLAGS) -rdc=true -isystem=$(NVSHMEM)/include $$($(BIN)/python -m pybind11 --includes) \
	  $(foreach arch,$(ARCHS),-gencode=arch=$(subst sm_,compute_,$(arch)),code=$(arch)) \
	  -shared --cudart=static $(NVSHMEM_SOURCES) -L$(NVSHMEM)/lib -lnvshmem_device \
	  -Xlinker=-l:libnvshmem_host.so.3 -o $@

$(STAMP): Makefile pyproject.toml setup.py $(CSRC)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "$(PYTHON) is older than Python 3.10; name a newer one: make PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV); the first time takes a few minutes."
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@if nvidia-smi -L > /dev/null 2>&1; then \
	  $(BIN)/python -m pip install --quiet "torch>=2.6"; \
	else \
	  $(BIN)/python -m pip install --quiet "torch==2.13.0+cpu" 2> /dev/null \
	  || { echo "No package index here offers torch 2.13.0+cpu: installing torch 2.13.0, which is larger."; \
	       $(BIN)/python -m pip install --quiet "torch==2.13.0"; }; \
	fi
	@# Without a GPU the extension is only imported: one architecture will do, csrc-check compiles them all.
	@if ! nvidia-smi -L > /dev/null 2>&1; then export MOE_EP_CUDA_ARCHS="$${MOE_EP_CUDA_ARCHS:-sm_90a}"; fi; \
	PYTHONWARNINGS=ignore::UserWarning $(BIN)/python -m pip install --quiet --editable ".[dev,plot]"
	@# For csrc-check: headers and device library, and nothing that they would need on a GPU.
	@if [ -n "$(CI)" ] && [ -n "$(NVCC)" ]; then \
	  $(BIN)/python -m pip install --quiet --no-deps nvidia-nvshmem-cu13 2> /dev/null \
	  || echo "No package index here offers nvidia-nvshmem-cu13: csrc/nvshmem will not be compiled."; \
	fi
	@# For the Megatron tests: pure Python for them, and without what it lists for GPUs.
	@$(BIN)/python -m pip install --quiet --no-deps --only-binary :all: "megatron-core>=0.16,<0.17" tqdm 2> /dev/null \
	  || echo "No package index here offers megatron-core 0.16 for this Python: the Megatron tests will be skipped."
	@$(BIN)/python -c 'from moe_ep import _native; print(f"Installed moe_ep {_native.describe()}.")'
	@touch $@

test-gpu: ## build for the GPUs at hand and run the GPU tests (GPU_PYTHON=python3: without .venv)
	@if nvidia-smi -L > /dev/null 2>&1; then \
	  $(MAKE) --no-print-directory gpu-build && scripts/gpu_tests.sh $(GPU_PYTHON); \
	else \
	  echo "test-gpu: needs an NVIDIA GPU with its driver (nvidia-smi finds none), two for the cases over NVLink, and"; \
	  echo "nvcc 12 or newer. Nothing ran and nothing counts as passed."; \
	fi

bench-gpu: ## measure dispatch, combine and the layer on the GPUs at hand: a table, a JSON file, a picture
	@if nvidia-smi -L > /dev/null 2>&1; then \
	  $(MAKE) --no-print-directory gpu-build && $(GPU_PYTHON) benchmarks/gpu.py; \
	else \
	  echo "bench-gpu: needs two NVIDIA GPUs with NVLink and their driver (nvidia-smi finds none), and nvcc 12 or newer."; \
	  echo "Nothing was measured."; \
	fi

sanitize-gpu: ## look for faults of memory and for races in the kernels with compute-sanitizer, on small exchanges
	@if nvidia-smi -L > /dev/null 2>&1; then \
	  $(MAKE) --no-print-directory gpu-build && scripts/sanitize.sh $(GPU_PYTHON); \
	else \
	  echo "sanitize-gpu: needs an NVIDIA GPU with its driver (nvidia-smi finds none). Nothing was checked."; \
	fi

gpu-build: $(GPU_NEEDS)
	@scripts/gpu_build.sh $(GPU_PYTHON)

clean: ## remove .venv and everything built
	rm -rf $(VENV) build dist *.egg-info moe_ep/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
