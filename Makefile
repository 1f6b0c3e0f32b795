# make demo   install into a virtual environment and run `python -m jax_fa_epilogue`
# make test   install, check formatting and lint, run the tests
#
# Both need Python 3.11 or newer with its headers and a C++20 compiler, nothing else. Variables:
#   PYTHON       interpreter to use (default: python3.11, else the first newer one found)
#   JAX          requirement for jax, e.g. JAX=jax==0.11.2 (default: the newest for that Python)
#   JAX_FA_CUDA  auto, on or off: build the CUDA kernels (default: auto; demo: off without a GPU)
#   KERNELS      build only the kernels whose name matches this regular expression (see CMakeLists.txt)
#   PYTEST_ARGS  arguments for pytest

SHELL := bash
comma := ,
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: demo test format clean tools

# A name on PATH can be a shim that does not run, so each candidate is run.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
  "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; \
  done)
TAG := $(shell "$(PYTHON)" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
HAS_GPU := $(wildcard /proc/driver/nvidia/version)$(shell nvidia-smi -L 2>/dev/null | head -n 1)
# Toolkit of the nvcc in use, for XLA's own use of ptxas in the tests.
CUDA_ROOT := $(shell PATH="$$PATH:/usr/local/cuda/bin" "$${CUDACXX:-nvcc}" --dryrun -x cu - \
  2>&1 < /dev/null | sed -n 's/.* TOP=//p')
JAX ?= jax
KERNELS ?=
PYTEST_ARGS ?= $(if $(HAS_GPU),,-n 2)

BUILD_VENV := .venv-build-$(TAG)
DEMO_VENV := .venv-demo-$(TAG)
TEST_VENV := .venv-test-$(TAG)

demo: JAX_FA_CUDA ?= $(if $(HAS_GPU),auto,off)
demo: EXTRAS := $(if $(HAS_GPU),[cuda13])
# -P: the installed package, not the source folder beside this file, which has no compiled module.
demo: $(BUILD_VENV)/ready
	$(call install,$(DEMO_VENV))
	$(DEMO_VENV)/bin/python -P -m jax_fa_epilogue

# Without a GPU the CUDA plugin of the same version compiles for one (tests/test_lowering.py).
test: JAX_FA_CUDA ?= auto
test: EXTRAS := [test,lint$(if $(HAS_GPU),$(comma)cuda13)]
test: $(BUILD_VENV)/ready
	$(call install,$(TEST_VENV))
	version=$$($(TEST_VENV)/bin/python -c 'from importlib import metadata; print(metadata.version("jax"))'); \
	$(TEST_VENV)/bin/python -m pip install -q --no-deps \
	  "jax-cuda13-plugin==$$version" "jax-cuda13-pjrt==$$version"
	$(TEST_VENV)/bin/ruff format --check .
	$(TEST_VENV)/bin/ruff check .
	$(CXX_FILES) | xargs -0 $(TEST_VENV)/bin/clang-format --dry-run -Werror
	$(if $(CUDA_ROOT),PATH="$(CUDA_ROOT)/bin:$$PATH" \
	  XLA_FLAGS="$${XLA_FLAGS-} --xla_gpu_cuda_data_dir=$(CUDA_ROOT)") \
	  $(TEST_VENV)/bin/pytest $(PYTEST_ARGS)

# Rewrites the files as `make test` wants them.
format:
	$(TEST_VENV)/bin/ruff format .
	$(CXX_FILES) | xargs -0 $(TEST_VENV)/bin/clang-format -i

clean:
	rm -rf build .venv-build-* .venv-demo-* .venv-test-*

CXX_FILES := find cuda tests \( -name '*.h' -o -name '*.cuh' -o -name '*.cc' \) -print0

# Builds the wheel and installs it with the extras into the virtual environment $(1).
define install
	test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	rm -rf $(1)/wheel
	echo "Building jax_fa_epilogue (JAX_FA_CUDA=$(JAX_FA_CUDA))"
	JAX_FA_CUDA="$(JAX_FA_CUDA)" JAX_FA_KERNELS="$(KERNELS)" $(BUILD_VENV)/bin/python -m pip wheel -q \
	  --no-build-isolation --no-deps -w $(1)/wheel .
	echo "Installing it into $(1)"
	$(1)/bin/python -m pip install -q --no-deps --force-reinstall $(1)/wheel/*.whl
	$(1)/bin/python -m pip install -q "$(JAX)" "$$(echo $(1)/wheel/*.whl)$(EXTRAS)"
endef

# The build requirements get an environment of their own, not pip's isolated one: that is at a new
# path in each build, so that every kernel would be compiled again.
$(BUILD_VENV)/ready: pyproject.toml | tools
	$(PYTHON) -m venv $(BUILD_VENV)
	echo "Installing the build requirements into $(BUILD_VENV)"
	$(BUILD_VENV)/bin/python -c 'import tomllib; \
	  print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' \
	  > $(BUILD_VENV)/requirements.txt
	$(BUILD_VENV)/bin/python -m pip install -q -r $(BUILD_VENV)/requirements.txt 'cmake>=3.26' ninja
	touch $@

tools:
	"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
	  echo "$(PYTHON) has no venv module (Debian: apt-get install python3-venv)" >&2; exit 1; }
	$(PYTHON) -c 'import os, sysconfig; \
	  open(os.path.join(sysconfig.get_path("include"), "Python.h"))' 2>/dev/null || { \
	  echo "$(PYTHON) has no headers (Debian: apt-get install python3-dev)" >&2; exit 1; }
	$(CXX) -std=c++20 -fsyntax-only -x c++ /dev/null 2>/dev/null || { \
	  echo "no C++20 compiler: '$(CXX)' does not run; install g++ or set CXX" >&2; exit 1; }

$(VERBOSE).SILENT:
