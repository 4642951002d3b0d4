# `make demo` and `make test` do all the set-up by themselves. TORCH_VERSION, TORCH_INDEX_URL, PYTHON3 and JOBS may be set.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := build

VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
CMAKE := $(BIN)/cmake

export PATH := $(CURDIR)/$(BIN):$(PATH)
# So that another checkout of the same sources finds what this one compiled.
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1

CONFIGURE = $(CMAKE) --preset $@ --log-level=WARNING >/dev/null
CPP_FILES = $(shell find src tests/cpp tools examples bench -name '*.cpp' -o -name '*.h')
CORE_FILES = $(shell find src/ulysses/base src/ulysses/contract src/ulysses/partition tools -name '*.cpp')
PYTHON_DIRS = python tests examples scripts bench

.PHONY: setup build demo demo-cpp doctor-cpp test test-fast lint format docs report-check peers-report clean core dev
.PHONY: asan tsan bench bench-quick bench-instructions bench-kernel
.PHONY: test-diffusers test-transformers compare-diffusers compatibility

setup:
	@scripts/setup.sh

core: setup
	@$(CONFIGURE)
	@$(CMAKE) --build --preset core -j $(JOBS)

dev: setup
	@$(CONFIGURE)
	@$(CMAKE) --build --preset dev -j $(JOBS)

asan tsan: setup
	@$(CONFIGURE)
	@$(CMAKE) --build --preset $@ -j $(JOBS)

build: dev
	@scripts/link_dev.sh build/dev/python

demo: build
	@$(BIN)/ulysses demo --out demo-out

demo-cpp: build
	@$(CMAKE) --build --preset dev -j $(JOBS) --target demo-cpp
	@build/dev/examples/cpp/demo-cpp

doctor-cpp: build
	@$(CMAKE) --build --preset dev -j $(JOBS) --target doctor-cpp
	@build/dev/examples/cpp/doctor-cpp

# One configuration after the other: each is wide enough for the machine.
test: build
	@$(MAKE) asan
	@$(MAKE) tsan
	@$(BIN)/python -m pytest

test-fast: build
	@$(BIN)/python -m pytest -m "not sanitizer and not slow"

lint: setup
	@scripts/check_layers.py
	@$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)
	@$(BIN)/ruff check --quiet $(PYTHON_DIRS)
	@$(BIN)/ruff format --check --quiet $(PYTHON_DIRS)
	@$(BIN)/mypy --no-error-summary python/ulysses_attention python/ulysses_pytest
	@$(CMAKE) --preset core --log-level=WARNING >/dev/null
	@printf '%s\n' $(CORE_FILES) | xargs -P $(JOBS) -n 4 clang-tidy -p build/core --quiet 2>/dev/null
	@echo "lint: ok"

format: setup
	@$(BIN)/clang-format -i $(CPP_FILES)
	@$(BIN)/ruff check --fix --quiet $(PYTHON_DIRS)
	@$(BIN)/ruff format --quiet $(PYTHON_DIRS)

docs: build
	@$(BIN)/ulysses guide > build/guide.md && mv build/guide.md docs/guide.md
	@$(BIN)/ulysses guide --errors > build/errors.md && mv build/errors.md docs/errors.md
	@$(BIN)/ulysses guide --table > build/capabilities.md && mv build/capabilities.md docs/capabilities.md
	@$(BIN)/python -m ulysses_attention.doctor.schema > build/doctor-report.md
	@mv build/doctor-report.md docs/doctor-report.md

# The page of a real run, as a browser shows it; its top is the README's picture. A wrong target is exit 1 of the doctor.
report-check: build
	@rm -f build/report.html
	@PYTHONPATH=tests $(BIN)/ulysses doctor tests/mutants/local_kv.py:attention --html build/report.html || true
	@$(BIN)/python scripts/report_check.py build/report.html docs/images/doctor.png

# Not part of `make test`: it installs other libraries, into an environment of their own, and takes minutes.
peers-report: build
	@scripts/install_peers.sh
	@PYTHONPATH=build/dev/python .venv-peers/bin/python -m ulysses_attention.doctor.peers_report build/peers \
	  >build/peers.md && mv build/peers.md docs/peers.md

# Not part of `make test`: other versions of diffusers and transformers, each in an environment of its own. VERSION= says
# which; `make compatibility` runs all of them and makes docs/compatibility.md.
COMPATIBILITY := build/compatibility
diffusers_VERSIONS := 0.36.0 0.38.0 0.40.0 0.42.1
transformers_VERSIONS := 5.0.0 5.24.0
PROOF = OMP_NUM_THREADS=1 PYTHONPATH=build/dev/python:tests

test-diffusers test-transformers: build
	@[ -n "$(VERSION)" ] || { echo "$@: no version. Fix: make $@ VERSION=$(firstword $($(@:test-%=%)_VERSIONS))" >&2; exit 1; }
	@scripts/install_framework.sh $(@:test-%=%) $(VERSION)
	@$(PROOF) .venv-$(@:test-%=%)-$(VERSION)/bin/python tests/compat_run.py $(@:test-%=%) $(COMPATIBILITY)

compare-diffusers: build
	@$(PROOF) $(BIN)/python tests/compat_compare.py $(COMPATIBILITY)

compatibility: build
	@rm -rf $(COMPATIBILITY)
	@for version in $(diffusers_VERSIONS); do $(MAKE) test-diffusers VERSION=$$version; done
	@for version in $(transformers_VERSIONS); do $(MAKE) test-transformers VERSION=$$version; done
	@$(MAKE) compare-diffusers
	@$(PROOF) $(BIN)/python tests/compat_page.py $(COMPATIBILITY) >build/compatibility.md
	@mv build/compatibility.md docs/compatibility.md

# Not part of `make test`: the stored numbers are those of one compiler, built_with in baseline.json; .ci/run holds them.
# count.py --write stores new ones.
bench-instructions:
	@scripts/setup.sh valgrind
	@$(CMAKE) --preset dev --log-level=WARNING >/dev/null
	@$(CMAKE) --build --preset dev -j $(JOBS) --target plain_call
	@$(BIN)/python bench/instructions/count.py build/dev/bench/instructions/plain_call

# Not part of `make test`: it takes minutes and compares times. Exit 1 where a target does not hold on this machine.
bench-kernel: setup
	@$(CMAKE) --preset dev --log-level=WARNING >/dev/null
	@$(CMAKE) --build --preset dev -j $(JOBS) --target kernel_bench
	@build/dev/bench/kernel/kernel_bench --json build/bench-kernel.json

# Not part of `make test`: it installs other libraries, takes half an hour and wants the machine for itself. Exit 1
# where its control fails; a second run measures only what is missing. BENCH_ARGS: --go-on, --fresh, --only PATTERN, ...
BENCH = PYTHONPATH=build/dev/python:bench .venv-peers/bin/python -m contest $(BENCH_ARGS)

bench: build
	@scripts/install_peers.sh
	@$(BENCH) --page docs/performance.md

bench-quick: build
	@scripts/install_peers.sh
	@$(BENCH) --quick

clean:
	@rm -rf build dist demo-out .pytest_cache .mypy_cache .ruff_cache .hypothesis
