# Every target works on a fresh machine: it installs what it needs first. See docs/development.md.
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(RERUNS)
STAMP := $(VENV)/.installed
COMPUTING := tests/control tests/simulator tests/simulation tests/solvers tests/perf tests/scheduling tests/native \
	studies/tests
PLATFORMS := tests/end_to_end tests/cli
# Compiled modules and tests are kept beside their sources also where the caller's environment says otherwise: each of the
# hundreds of processes that the tests start, and each collection, would compile all of them again.
export PYTHONDONTWRITEBYTECODE :=
# In CI: no reruns where tests only compute: their outcome does not change, and the plugin costs each test some
# milliseconds. The rules of the house are among the checks, so the fast lane does not play them again there.
SURE := $(addprefix tests/,conformance core golden perf replay scheduling serving simulation simulator solvers testing \
	workloads) studies/tests
# Tests that measure, check a running service's objective or need most of the memory run after all others, in four groups that
# together leave half of two processors free: those of functions and of the tide mostly wait, but must not wait for long.
# A worker of pytest that dies leaves `loadgroup` waiting for ever (pytest-xdist 3.8, issues 1323 and 1378), so only lanes with
# groups of tests use it, and these end as failed at once. In CI a lane that hangs is interrupted and shows what it was at.
SPREAD := --dist worksteal
GROUPS := --dist loadgroup --max-worker-restart 0
LANE_LIMIT_S := 36000
ALONE := $(addprefix tests/end_to_end/test_,tide_live.py sharing_bench_live.py gpu_sharing_live.py \
	goodput_live.py quote_live.py functions.py) tests/native/test_gpu_daemon.py tests/native/test_gpu_daemon_soak.py
# A fixed part of the sweeps over seeds, crash points and kills, for CI. `make full` plays all of them.
SAMPLE := SPRINGTIDE_SEEDS=60 SPRINGTIDE_LOAN_SEEDS=20 SPRINGTIDE_SWEEP_STRIDE=20 SPRINGTIDE_KILLS=8
# How many tests run at a time: one that computes keeps a core busy, one of real processes a sixth of it.
NUM_COMPUTING := 2
NUM_PROCESSES := 4
CHAINS := chain-computing chain-waiting

.PHONY: setup demo check test upgrade slow slow-computing slow-processes slow-platforms slow-alone examples kubernetes gpu \
	broken planted stubs golden bench ci full lanes $(CHAINS) clean browser servers compiler machine

setup: $(STAMP)

# pip, not uv: the pinned CPU build of torch is found by pip only. Modules are compiled when they are first imported: compiling all
# of them takes longer than the rest, and most are never imported.
$(STAMP): pyproject.toml studies/pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[runtime,functions,examples,studies,libraries,dev]' --editable ./studies
	@touch $@

demo: setup
	$(BIN)/python examples/demo.py

check: setup
	$(BIN)/ruff format --check src studies tests examples benchmarks
	$(BIN)/ruff check src studies tests examples benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PYTEST) tests/test_tidy.py

test: setup servers compiler
	$(PYTEST) $(if $(RERUNS),$(SURE:%=--rerun-exclude-path=%) --ignore=tests/test_tidy.py) -n 2 $(SPREAD)

slow: slow-computing slow-processes slow-platforms slow-alone

slow-computing: setup servers compiler
	$(PYTEST) -m slow --timeout 600 -n $(NUM_COMPUTING) $(SPREAD) $(COMPUTING) $(ALONE:%=--ignore=%)

slow-processes: setup browser servers compiler
	$(PYTEST) -m slow --timeout 600 -n $(NUM_PROCESSES) $(GROUPS) tests \
	  $(COMPUTING:%=--ignore=%) $(PLATFORMS:%=--ignore=%)

slow-platforms: setup browser servers compiler
	$(PYTEST) -m slow --timeout 600 -n $(NUM_PROCESSES) $(GROUPS) $(PLATFORMS) $(ALONE:%=--ignore=%)

slow-alone: setup browser servers compiler
	$(PYTEST) -m slow --timeout 600 -n 3 $(GROUPS) $(ALONE)

# The last release's wheel is built from this clone's history, started, killed, and goes on under this version.
upgrade: setup
	$(PYTEST) -m slow -rs --timeout 600 tests/end_to_end/test_upgrade.py

examples: setup servers
	$(PYTEST) -m examples --timeout 600 tests/examples

# Every deliberately broken build of the interposition library, each found out by the test that is named beside it.
broken: setup compiler
	$(PYTEST) -m "broken or slow" --timeout 600 -n 2 tests/native/test_native_broken_builds.py

# Every bug that is planted in the Python source, each found out by the test that is named beside it.
planted: setup
	$(PYTEST) -m "slow or not slow" --timeout 600 -n 2 tests/planted

# The cluster that KUBECONFIG names, or a lab of this machine's own where there is one; otherwise its tests say that they
# are skipped. One of the two has the lab with nodes, the other an API server of its own.
kubernetes: setup servers
	$(PYTEST) -m kubernetes -rs --timeout 900 -n 2 --dist loadfile --max-worker-restart 0 tests/kubernetes

gpu: setup compiler
	$(PYTEST) -m gpu -rs --timeout 600

stubs: setup
	$(BIN)/python -m grpc_tools.protoc -I src/springtide/service/grpc \
	  --descriptor_set_out=src/springtide/service/grpc/inference.binpb inference.proto

golden: setup
	$(BIN)/python -m springtide_studies.fault_seeds.golden --write

bench: setup
	$(BIN)/springtide bench resize --json
	$(BIN)/springtide bench gateway --json

# The browser test needs Debian's chromium; without the right to install it the test says that it is skipped.
browser:
	@command -v chromium >/dev/null || (apt-get update -qq && apt-get install -y -qq chromium >/dev/null) || \
	  echo "chromium is not installed and cannot be: the browser test will be skipped"

# A real Redis for the parameter store's tests, a real PostgreSQL for the journal's and a wall clock that can be set for the
# clock's: Debian's; without the right to install them their tests say that they are skipped.
servers:
	@command -v faketime >/dev/null || (apt-get update -qq && apt-get install -y -qq faketime >/dev/null) || \
	  echo "faketime is not installed and cannot be: its tests will be skipped"
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

# Packages of Python and of Debian are installed side by side.
machine:
	@$(MAKE) --no-print-directory browser servers compiler & debian=$$!; \
	$(MAKE) --no-print-directory setup && wait $$debian

# A lane that fails does not stop the others, so that one run shows every failure. A test
# that fails is run once more, and both outcomes are printed: real processes on a shared machine can miss a moment. What
# fails twice has failed, and so has a lane with more than a handful of these.
ci full: RERUNS := --reruns 1 --reruns-delay 2 --max-suite-reruns 5 --rerun-show-tracebacks
ci: machine
	$(SAMPLE) $(MAKE) --no-print-directory lanes RERUNS="$(RERUNS)" LANE_LIMIT_S=2700

full: machine
	SPRINGTIDE_DRAWS_AFRESH=1 $(MAKE) --no-print-directory lanes RERUNS="$(RERUNS)"
	$(MAKE) --no-print-directory broken

# Two chains of lanes run side by side, one that begins with what computes and one that waits for a cluster and for platforms.
# More of them would take longer: what trains while a test waits takes the more of the processors the longer that is. Lanes that
# measure come last and alone. What a lane prints appears when it ends.
chain-computing: LANES := check test slow-computing slow-processes
chain-waiting: LANES := kubernetes slow-platforms examples
lanes:
	@$(MAKE) --no-print-directory --keep-going --jobs 2 --output-sync=target $(CHAINS); first=$$?; \
	$(MAKE) --no-print-directory timed-slow-alone && exit $$first

$(CHAINS):
	@failed=""; \
	for lane in $(LANES); do $(MAKE) --no-print-directory timed-$$lane || failed="$$failed $$lane"; done; \
	test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

timed-%:
	@begun=$$(date +%s); timeout --signal=INT --kill-after=60 $(LANE_LIMIT_S) $(MAKE) --no-print-directory $*; status=$$?; \
	echo "== $* took $$(( $$(date +%s) - begun )) s"; exit $$status

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
