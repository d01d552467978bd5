# Every target works on a fresh machine: it installs what it needs first. See docs/development.md.
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(RERUNS)
STAMP := $(VENV)/.installed
COMPUTING := tests/control tests/simulator tests/simulation tests/solvers tests/perf tests/scheduling tests/native \
	studies/tests
# What only computes says the same again; and asking about reruns costs each of its thousands of tests some milliseconds.
SURE := $(addprefix tests/,conformance core golden perf replay scheduling serving simulation simulator solvers testing \
	workloads) studies/tests
# What measures, holds a running service to its objective, or needs most of the memory, has the machine to itself.
ALONE := $(addprefix tests/end_to_end/test_,tide_live.py sharing_live.py sharing_bench_live.py gpu_sharing_live.py \
	report_latency.py goodput_live.py quote_live.py functions.py)

.PHONY: setup demo check test slow slow-computing slow-processes slow-alone examples kubernetes gpu broken golden bench ci \
	clean browser servers compiler

setup: $(STAMP)

# pip, not uv: the pinned CPU build of torch is found by pip only.
$(STAMP): pyproject.toml studies/pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[runtime,functions,examples,studies,dev]' --editable ./studies
	@touch $@

demo: setup
	$(BIN)/python examples/demo.py

check: setup
	$(BIN)/ruff format --check src studies tests examples
	$(BIN)/ruff check src studies tests examples
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PYTEST) tests/test_tidy.py

test: setup servers compiler
	$(PYTEST) $(if $(RERUNS),$(SURE:%=--rerun-exclude-path=%)) -n 2 --dist loadgroup

slow: slow-computing slow-processes slow-alone

# What computes runs two at a time, and so do real processes, which wait for most of their time.
slow-computing: setup servers compiler
	$(PYTEST) -m slow --timeout 600 -n 2 --dist loadgroup $(COMPUTING)

slow-processes: setup browser servers compiler
	$(PYTEST) -m slow --timeout 600 -n 2 --dist loadgroup $(COMPUTING:%=--ignore=%) $(ALONE:%=--ignore=%)

slow-alone: setup browser servers compiler
	$(PYTEST) -m slow --timeout 600 $(ALONE)

examples: setup servers
	$(PYTEST) -m examples --timeout 600

# Every deliberately broken build of the interposition library, each found out by the test that is named beside it.
broken: setup compiler
	$(PYTEST) -m "broken or slow" --timeout 600 -n 2 tests/native/test_native_broken_builds.py

# The cluster that KUBECONFIG names, or a lab of this machine's own where there is one; otherwise its tests say that they
# are skipped. One of the two has the lab with nodes, the other an API server of its own.
kubernetes: setup servers
	$(PYTEST) -m kubernetes -rs --timeout 900 -n 2 --dist loadfile tests/kubernetes

gpu: setup compiler
	$(PYTEST) -m gpu -rs --timeout 600

golden: setup
	$(BIN)/python -m springtide_studies.fault_seeds.golden --write

bench: setup
	$(BIN)/springtide bench resize --json
	$(BIN)/springtide bench gateway --json

# The browser test needs Debian's chromium; without the right to install it the test says that it is skipped.
browser:
	@command -v chromium >/dev/null || (apt-get update -qq && apt-get install -y -qq chromium >/dev/null) || \
	  echo "chromium is not installed and cannot be: the browser test will be skipped"

# A real Redis for the parameter store's tests and a real PostgreSQL for the journal's: Debian's; without the right to
# install them their tests say that they are skipped.
servers:
	@command -v redis-server >/dev/null || (apt-get update -qq && apt-get install -y -qq redis-server >/dev/null) || \
	  echo "redis-server is not installed and cannot be: its tests will be skipped"
	@ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || \
	  (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq postgresql >/dev/null) || \
	  echo "postgresql is not installed and cannot be: its tests will be skipped"

# A C compiler for the library that holds shares of GPUs; without it and without the right to install it its tests say that
# they are skipped. CUDA's headers come with the dev extra.
compiler:
	@command -v cc >/dev/null || command -v gcc >/dev/null || \
	  (apt-get update -qq && apt-get install -y -qq gcc libc6-dev >/dev/null) || \
	  echo "there is no C compiler and it cannot be installed: the tests of native/ will be skipped"

# One that fails keeps none of the others from being run: whoever reads the output sees all that is to be mended. A test
# that fails is run once more, and both outcomes are printed: real processes on a shared machine can miss a moment. What
# fails twice has failed, and so has a lane with more than a handful of these.
ci: RERUNS := --reruns 1 --reruns-delay 2 --max-suite-reruns 5 --rerun-show-tracebacks
ci:
	$(MAKE) --keep-going RERUNS="$(RERUNS)" check test slow kubernetes examples

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
