# SPDX-License-Identifier: Apache-2.0
# Every target sets up .venv as far as it needs it. PYTHON chooses the interpreter, at least 3.11.

PYTHON ?= python3
DEMO_ARGS ?=
PYTEST_ARGS ?=
MUTANTS_ARGS ?=
BENCH_ARGS ?=
BENCH_OUT ?= docs/measurements/bench
SOAK_MINUTES ?= 30

export PYTHON
BIN := .venv/bin
SETUP := scripts/setup_venv.sh
# One thread: with two vLLM's kernels and the cache's own threads fight over a small machine's cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

# Other releases of vLLM for `make soak`: those of Runs.NIGHTLY in omni_core/integrations/vllm/releases/engine_releases.py.
NIGHTLY_VLLM := 0.27.0 0.30.0
VLLM ?= $(NIGHTLY_VLLM)
OTHER_VERSIONS := tests/engine/test_other_versions.py::test_the_engine_tests_pass_on_another_release

.PHONY: help setup lint test test-fast test-engine test-vllm coverage matrix soak mutants demo bench docs clean

help:
	@echo "make demo         run vLLM on the CPU with prefix caching and check every delivered row (DEMO_ARGS='...')"
	@echo "make test         lint, then every test but the long ones"
	@echo "make test-fast    the tests that need no vLLM and build no package"
	@echo "make test-engine  the tests that run a real vLLM"
	@echo "make test-vllm    the engine tests on other releases of vLLM (VLLM='0.27.0 0.30.0'), each in a .venv-vllm-* of its own"
	@echo "make coverage     branch coverage of the prefix cache by the fast tests; fails below 95 %"
	@echo "make matrix       every feature of vLLM on a real engine; writes the feature matrix of docs and README"
	@echo "make soak         for the night: more random examples, the long tests, all features, other vLLMs, a random mix"
	@echo "make mutants      inject known bugs, one at a time, and see each caught (MUTANTS_ARGS='--only NAME')"
	@echo "make bench        what the cache costs, beside a copy and beside the peer; for a quiet machine (BENCH_ARGS='--skip vllm')"
	@echo "make lint         ruff and mypy"
	@echo "make docs         build the documentation into site/"
	@echo "make setup        only set up .venv, with everything"
	@echo "make clean        remove build products and caches; .venv and prepared models stay"

setup:
	@$(SETUP)

lint:
	@$(SETUP) core
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

# The tests that need no engine in two processes; engines one at a time.
test: setup lint
	$(PYTEST) --numprocesses 2 --dist loadfile -m "not engine and not slow"
	$(PYTEST) -m "engine and not slow"

test-fast:
	@$(SETUP) core
	$(PYTEST) --numprocesses 2 --dist loadfile -m "not engine and not packaging and not slow"

test-engine:
	@$(SETUP) core engine
	$(PYTEST) -m "engine and not slow"

# Each environment takes about 4 GB and, the first time, some minutes.
test-vllm:
	@$(SETUP) core
	scripts/setup_vllm.sh $(VLLM)
	$(PYTEST) --timeout 3600 -o faulthandler_timeout=0 $(foreach version,$(VLLM),"$(OTHER_VERSIONS)[$(version)]")

# Not the operation budgets: they count calls, and measuring coverage adds some.
coverage:
	@$(SETUP) core
	OMP_NUM_THREADS=1 $(BIN)/python -m coverage run -m pytest $(PYTEST_ARGS) -q tests/core tests/faults tests/testing \
		-m "not engine and not packaging and not slow" --ignore-glob "tests/core/test_operation_budget_*.py"
	$(BIN)/python -m coverage report

matrix: export FEATURE_RESULTS_FOLDER := $(CURDIR)/build/feature-results
matrix:
	@$(SETUP) core engine
	scripts/setup_vllm.sh $(NIGHTLY_VLLM)
	rm -rf $(FEATURE_RESULTS_FOLDER)
	$(PYTEST) --timeout 3600 -o faulthandler_timeout=3500 -m engine tests/engine
	PYTHONPATH=tests/engine/features $(BIN)/python scripts/render_feature_matrix.py --results $(FEATURE_RESULTS_FOLDER)

# Long tests may take longer than the time after which stacks are dumped.
soak:
	@$(SETUP) core engine
	scripts/setup_vllm.sh $(NIGHTLY_VLLM)
	HYPOTHESIS_PROFILE=nightly $(PYTEST) --timeout 3600 -o faulthandler_timeout=3500 -m "not engine and not packaging"
	$(PYTEST) --timeout 3600 -o faulthandler_timeout=3500 -m "engine and slow"
	OMP_NUM_THREADS=1 $(BIN)/python tests/engine/soak/engine_soak.py --minutes $(SOAK_MINUTES)

mutants:
	@$(SETUP) core
	PYTHONPATH=tests $(BIN)/python -m mutants.run $(MUTANTS_ARGS)

demo: export OMNI_CORE_HOME ?= $(CURDIR)/models
demo:
	@$(SETUP) core engine
	@$(BIN)/python -m omni_core.cli.main demo $(DEMO_ARGS)

# Every benchmark in a process of its own: about 80 minutes, of which `vllm` takes up to 40.
bench: export OMNI_CORE_HOME ?= $(CURDIR)/models
bench:
	@$(SETUP) core engine bench
	OMP_NUM_THREADS=1 $(BIN)/python -m omni_core.cli.main bench all --peer --out $(BENCH_OUT) $(BENCH_ARGS)

docs:
	@$(SETUP) core docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage htmlcov
	find omni_core backends tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
