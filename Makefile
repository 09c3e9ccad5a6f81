# The two commands: `make demo` and `make test`. Everything runs in .venv, made on first use.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready

.PHONY: demo test hostile multinode-test test-all test-floors check format lint types packaging bench clean

demo: $(READY)
	$(BIN)/python -m bench.demo

test: $(READY)
	$(BIN)/python -m pytest -n auto -m "not slow"

# Every Python that is here, each in an environment of its own.
test-all:
	@for version in 3.11 3.12 3.13; do \
	  python=python$$version; \
	  $$python -c "" 2>/dev/null || python=$$(ls $$HOME/.pyenv/versions/$$version.*/bin/python 2>/dev/null | tail -n 1); \
	  if ! $${python:-false} -c "" 2>/dev/null; then echo "== python$$version is not here"; continue; fi; \
	  echo "== python$$version"; $(MAKE) test PYTHON=$$python VENV=.venv-$$version || exit 1; \
	done

# Attacks in earnest: a million malformed descriptors, a minute of fuzzing, races and soaks.
hostile: $(READY)
	$(BIN)/python -m pip install -q "atheris>=2.3"
	$(BIN)/python -m pytest -s -m slow tests/hostile

# Four nodes, each a kernel of its own, and real NFS between them, on one machine; about 4 minutes.
# Root and the Debian packages; skipped, with the reason, where nodes cannot boot.
multinode-test: $(READY)
	@tests/multinode/lab/install.sh
	$(BIN)/python -m pytest -s --durations=12 -m multinode tests/multinode

# The oldest dependencies pyproject.toml allows.
test-floors:
	$(MAKE) .venv-floors/.ready VENV=.venv-floors
	.venv-floors/bin/python -m pip install -q $$($(PYTHON) .ci/floors.py)
	.venv-floors/bin/python -m pytest -n auto -m "not slow"

check: lint types packaging

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

packaging: $(READY)
	$(BIN)/python -m pytest -m "slow" tests/packaging

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	$(BIN)/python -m bench.view; a=$$?; $(BIN)/python -m bench.window; b=$$?; \
	$(BIN)/python -m bench.writer; exit $$((a + b + $$?))

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than 3.11: make PYTHON=python3.11 ..."; exit 1; }
	@echo "installing into $(VENV) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -e ".[dev]"
	touch $@

clean:
	rm -rf .venv .venv-* dist build .pytest_cache .mypy_cache .ruff_cache
