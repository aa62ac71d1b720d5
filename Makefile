# Targets create a virtual environment with their dependencies; Python >= 3.11 is enough. Stamp files avoid reinstalls.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

# Number of parallel test processes, and the tests to run: make test FILES="tests/scan tests/cost"
WORKERS ?= 2
FILES ?=
# Seed of `make fuzz` and `make test-slow`
SEED ?= 0
# Versions of torch and Python for `make test-versions`, such as VERSIONS=2.11.0/3.11; default: all supported ones
VERSIONS ?=
# The first variable disables torch's garbage collection after each compilation, a tenth of the time of small tests. The
# second skips a test of the CPU's vector instructions, which takes 5 to 20 seconds in each process that compiles. The
# third one keeps bytecode where a container turns it off, so that each rank imports the package in half of the time.
PYTEST := TORCH_DYNAMO_RUN_GC_AFTER_COMPILE=0 TORCHINDUCTOR_VEC_ISA_OK=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

.PHONY: demo test test-slow test-versions fuzz properties quick bench recipes docs lint format clean

demo: $(VENV)/.examples
	$(BIN)/python examples/train_lm.py

test: $(VENV)/.test
	$(PYTEST) -m "not slow" $(FILES)

quick: $(VENV)/.test
	$(PYTEST) -m "quick and not slow" $(FILES)

# The long sweeps: CASES random cases of each table, which SEED selects. All 17,000 (CASES=9999) take 7 hours of a core.
CASES ?= 30
test-slow: $(VENV)/.test $(VENV)/.recipes $(VENV)/.docs $(VENV)/.examples
	$(PYTEST) -m slow --slow-cases $(CASES) --slow-seed $(SEED) $(FILES)

# Other versions of torch and Python: downloads gigabytes the first time, and takes half an hour.
test-versions: $(VENV)/.versions
	$(BIN)/python benchmarks/versions.py --uv $(BIN)/uv $(VERSIONS)

# Random programs of every kind, every op of torch's op_db and faults on real ranks, for MINUTES. SEED selects the programs.
MINUTES ?= 10
fuzz: $(VENV)/.test
	TORCH_DYNAMO_RUN_GC_AFTER_COMPILE=0 PYTHONPATH=tests:benchmarks $(BIN)/python -m support.fuzz --minutes $(MINUTES) --seed $(SEED) --workers $(WORKERS)

# Property tests on random values, instead of the fixed examples of `make test`.
properties: $(VENV)/.test
	$(PYTEST) -m hypothesis --hypothesis-profile=fuzz $(FILES)

bench: $(VENV)/.examples
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/compile_time.py

# Compare each recipe of docs/ with a single device, under Inductor: minutes each. Writes benchmarks/results/checks/recipes.md.
RECIPES ?=
recipes: $(VENV)/.test $(VENV)/.recipes
	PYTHONPATH=tests:. $(BIN)/python -m support.docs.typed $(RECIPES)

# Build the site of docs/ in build/site; warnings are errors.
docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -q -W --keep-going -E -d build/doctrees docs build/site

# The subjects of the last 100 commits have at most 72 characters, without merges. There are none outside of a clone.
LONG_SUBJECTS = $(shell git log --no-merges -n 100 --format=%s 2>/dev/null | awk 'length($$0) > 72')

lint: $(VENV)/.dev
	$(if $(LONG_SUBJECTS),$(error commit messages: expected subjects of at most 72 characters, got: $(LONG_SUBJECTS)))
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

# The version of triton for torch 2.13. Its CPU build does not depend on triton, and pip would install the newest one.
$(VENV)/.test: WITH = "triton<3.8; platform_system == 'Linux' and platform_machine == 'x86_64'"

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
