# Every target sets up what it needs, from nothing. `make help` lists them.
PYTHON ?= python3
BIN := .venv/bin
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup demo test test-models test-soak test-clients test-native test-sanitized test-tsan lint format bench clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: .venv/.setup ## .venv/bin/bitdraft, with what it needs to run

NATIVE := CMakeLists.txt $(wildcard csrc/*.cpp csrc/*.h csrc/*/*.cpp csrc/*/*.h csrc/*/*.inl)

.venv/.setup: pyproject.toml constraints.txt $(NATIVE)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable .
	touch $@

# The kernels are compiled at each installation: once is enough.
.venv/.dev: pyproject.toml constraints.txt $(NATIVE)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch .venv/.setup $@

.venv/.eval: .venv/.dev
	$(BIN)/pip install --quiet 'lm_eval[api]==0.4.13'
	touch $@

demo: .venv/.setup ## measure a real model pair; the report is demo/report.html
	$(BIN)/bitdraft measure --target qwen2.5-coder-1.5b --draft qwen2.5-coder-0.5b \
	  --formats bf16,fp8,w4a16-awq --workload code,chat --prompts 4 --max-tokens 16 --k 1..4 \
	  --confirm 1 --confirm-prompts 2 --rounds 1 --resume -o demo

test: .venv/.dev ## all tests but those on the large model files
	$(BIN)/pytest

test-models: .venv/.dev ## the tests on the large model files
	$(BIN)/pytest -m models

test-soak: .venv/.dev ## 1,000 mixed requests at once against a server
	$(BIN)/pytest -m soak

test-clients: .venv/.eval ## lm-evaluation-harness against a server (half a gigabyte of packages)
	$(BIN)/pytest -m clients

# A build tree of its own under build/, its tests built and run: $(call native,NAME,OPTIONS)
NINJA := $(if $(shell command -v ninja),-G Ninja)
SIMDE := $(wildcard /usr/include/simde/x86/avx512.h)
define native
	cmake -S . -B build/$(1) $(NINJA) -DBITDRAFT_CPP_TESTS=ON $(2)
	cmake --build build/$(1) --parallel 2
	ctest --test-dir build/$(1) --output-on-failure
endef

test-native: test-sanitized ## the C++ tests: with sanitizers, then plain, with AVX-512 emulated if SIMDe is there
	$(call native,native,$(if $(SIMDE),-DBITDRAFT_EMULATE_AVX512=ON))

test-sanitized: ## the C++ tests with address and undefined-behaviour sanitizers, as CI runs them
	$(call native,sanitized,-DBITDRAFT_SANITIZE=ON)

test-tsan: ## the C++ tests of what threads share, with the thread sanitizer
	cmake -S . -B build/tsan $(NINJA) -DBITDRAFT_CPP_TESTS=ON -DBITDRAFT_SANITIZE_THREADS=ON
	cmake --build build/tsan --parallel 2 --target pool_test decode_test
	ctest --test-dir build/tsan --output-on-failure -R '^(pool|decode_)'

lint: .venv/.dev ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.dev ## mend style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.dev ## the measured matrix of docs/log.md (under an hour on two cores)
	$(BIN)/python benchmarks/precision_matrix.py

clean: ## remove what the targets made, but not downloaded models
	rm -rf .venv demo build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
