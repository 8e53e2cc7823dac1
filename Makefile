# make setup    create .venv with the pinned dependencies (demo and test do it themselves)
# make demo     fine-tune a tiny vision-language model to read handwritten digits
# make test     run the tests
# make test-recipes     run the Tinker cookbook's recipes, unmodified, against a server with tiny models
# make test-vllm        run the tests that start real vLLM servers (its CPU build, in an environment of its own)
# make test-rl          let the examples of reinforcement learning learn, and draw their curves into rl-output/ (half an hour)
# make lint | format | typecheck | proto | clean

VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed
RECIPES_VENV := .venv-recipes
RECIPES_STAMP := $(RECIPES_VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
PROTO := tinsmith/wire/tinker.proto

# --no-compile below relies on it.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo test test-recipes test-vllm test-rl lint format typecheck proto clean

setup: $(STAMP)

# Wheels only and exact versions: nothing is built, and no newer torch is ever resolved. Byte code is written when a module is first
# imported: pip would spend 40 seconds on modules that nobody imports.
$(STAMP): pyproject.toml constraints.txt
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Tinsmith needs python3 3.11 or newer; this is $$(python3 --version 2>&1). Put a newer python3 first in PATH." >&2; exit 1; }
	python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --only-binary :all: --constraint constraints.txt --no-compile --editable '.[dev]'
	@touch $@

demo: $(STAMP)
	$(PYTHON) examples/digits.py

# Two processes, each with a file at a time, in order: the slow files, acceptance, come first.
test: $(STAMP)
	$(PYTHON) -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

$(RECIPES_STAMP): constraints-recipes.txt
	python3 -m venv $(RECIPES_VENV)
	$(RECIPES_VENV)/bin/python -m pip install --quiet --only-binary :all: --no-deps --no-compile --requirement $<
	@touch $@

# In order, in one process: the later recipes start from what the earlier ones have trained. With one thread each, server and recipe
# do not wait for each other's threads on a busy machine.
test-recipes: $(STAMP) $(RECIPES_STAMP)
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest tests/recipes --basetemp recipes-output --timeout 900 --durations 0 --durations-min 1

$(VLLM_STAMP): constraints-vllm.txt
	python3 -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --only-binary :all: --no-deps --no-compile --requirement $<
	@touch $@

test-vllm: $(STAMP) $(VLLM_STAMP)
	TINSMITH_VLLM_PYTHON=$(VLLM_VENV)/bin/python $(PYTHON) -m pytest tests/with_vllm --timeout 600 --durations 0 --durations-min 1

# The adapters for the cookbook are tested with the one that test-recipes installs.
test-rl: $(STAMP) $(RECIPES_STAMP)
	PYTHONPATH=$$(echo $(RECIPES_VENV)/lib/python3*/site-packages) $(PYTHON) -m pytest tests/rl/test_tinker_cookbook.py
	OMP_NUM_THREADS=2 $(PYTHON) -m pytest tests/rl_runs --durations 0 --durations-min 1

lint: $(STAMP)
	$(PYTHON) -m ruff check

format: $(STAMP)
	$(PYTHON) -m ruff check --fix-only
	$(PYTHON) -m ruff format

typecheck: $(STAMP)
	$(PYTHON) -m mypy

proto: $(STAMP)
	$(PYTHON) -m grpc_tools.protoc --proto_path=. --python_out=. --pyi_out=. $(PROTO)

clean:
	rm -rf $(VENV) $(RECIPES_VENV) $(VLLM_VENV) demo-output recipes-output rl-output build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
