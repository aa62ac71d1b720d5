# Everything a fresh machine with Python >= 3.11 needs. A stamp file in the environment makes second runs quick.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

# Test processes side by side, and what they run: make test FILES="tests/scan tests/cost"
WORKERS ?= 2
FILES ?=
# Torch and Python of `make test-versions`, as in VERSIONS=2.11.0/3.11; all that are claimed by default
VERSIONS ?=
# Each test compiles something small, so torch's garbage collection behind each compilation is a tenth of the time. What
# vector instructions the CPU says to have it has: trying them out takes each process that compiles 5 to 20 seconds.
PYTEST := TORCH_DYNAMO_RUN_GC_AFTER_COMPILE=0 TORCHINDUCTOR_VEC_ISA_OK=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

.PHONY: demo test test-slow test-versions fuzz properties quick bench recipes docs lint format clean

demo: $(VENV)/.examples
	$(BIN)/python examples/train_lm.py

test: $(VENV)/.test
	$(PYTEST) -m "not slow" $(FILES)

quick: $(VENV)/.test
	$(PYTEST) -m "quick and not slow" $(FILES)

test-slow: $(VENV)/.test $(VENV)/.recipes $(VENV)/.docs
	$(PYTEST) -m slow $(FILES)

# Other versions of torch and Python: gigabytes the first time, half an hour each time.
test-versions: $(VENV)/.versions
	$(BIN)/python benchmarks/versions.py --uv $(BIN)/uv $(VERSIONS)

# Random programs of every kind, every op of torch's op_db and faults on real ranks, for so many minutes. Each SEED draws others.
MINUTES ?= 10
SEED ?= 0
fuzz: $(VENV)/.test
	TORCH_DYNAMO_RUN_GC_AFTER_COMPILE=0 PYTHONPATH=tests:benchmarks $(BIN)/python -m support.fuzz --minutes $(MINUTES) --seed $(SEED) --workers $(WORKERS)

# What tests state of any value, on other values than the ones that `make test` always draws.
properties: $(VENV)/.test
	$(PYTEST) -m hypothesis --hypothesis-profile=fuzz $(FILES)

bench: $(VENV)/.examples
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/compile_time.py

# Each recipe of docs/ as it is typed, with Inductor, beside one device: minutes each. Written to benchmarks/results/recipes.md.
RECIPES ?=
recipes: $(VENV)/.test $(VENV)/.recipes
	PYTHONPATH=tests:. $(BIN)/python -m support.docs.typed $(RECIPES)

# The site of docs/, in build/site; any warning is an error.
docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -q -W --keep-going -E -d build/doctrees docs build/site

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy sp_compile

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.torch:
	$(PYTHON) -c 'import sys; sys.exit("sp_compile needs Python 3.11 or newer") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q $(TORCH)
	touch $@

$(VENV)/.test $(VENV)/.recipes $(VENV)/.examples $(VENV)/.docs $(VENV)/.dev $(VENV)/.versions: $(VENV)/.%: pyproject.toml | $(VENV)/.torch
	$(BIN)/pip install -q -e .[$*] $(WITH)
	touch $@

# The triton that torch 2.13 is built with: its CPU build asks for none, and pip would take the newest.
$(VENV)/.test: WITH = "triton<3.8; platform_system == 'Linux' and platform_machine == 'x86_64'"

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
