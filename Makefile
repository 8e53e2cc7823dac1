# make setup    create .venv with what serves and trains, in pinned versions
# make dev      the same, and what tests and checks need
# make demo     fine-tune a tiny vision-language model to read handwritten digits, and show it in the console until Ctrl-C, in a terminal
# make test     run the tests that every change needs
# make test-slow run the tests that are marked slow, which CI runs too; those of recipes and vLLM run with test-all alone
# make test-oldest run the numerical tests with the oldest transformers that pyproject.toml allows
# make test-all run everything there is: slow tests, long random runs, recipes, real vLLM servers
# make test-recipes     run the Tinker cookbook's recipes, unmodified, against a server with tiny models
# make mutations        put faults into a copy of the product, one after the other, each of which a test must find (about 6 minutes)
# make chaos            kill workers, engines, servers and parsers at random moments of SFT and RL runs, whose curves must not change (an hour; 8 minutes on 16 processors)
# make invariants       print what Tinsmith promises, and which test guards it
# make test-vllm        run the tests that start real vLLM servers (its CPU build, in an environment of its own)
# make test-wheel       build the wheels, install them into an empty environment, and run the demo there; WHEEL_PYTHONS names several Pythons
# make test-distributed  run the tests of several workers alone; they are part of `make test`
# make test-gpu         run the numerical tests on this machine's GPU, and keep their output in benchmarks/results/
# make test-gpus        run the tests of several workers with a GPU for each, which needs two or more, and keep their output there too
# make test-rl          let the examples of reinforcement learning learn, and draw their curves into rl-output/ (half an hour)
# Each target installs what it needs by itself.
# make environments     create the environments in which recipes and vLLM run
# make docs            make a site of the documentation in site/, with reference pages of all commands, settings, routes, metrics and errors
# make lint | format | typecheck | proto | clean

VENV := .venv
PYTHON := $(VENV)/bin/python
# One for each group of dependencies that is installed there. The developers' group holds the others.
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
DEV_STAMP := $(VENV)/.installed-dev
LINT_STAMP := $(VENV)/.installed-lint
RECIPES_VENV := .venv-recipes
RECIPES_STAMP := $(RECIPES_VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
WHEEL_VENV := .venv-wheel
# Of serving: object stores and vLLM servers.
SERVING_EXTRAS := s3,vllm-client
PROTO := tinsmith/wire/tinker.proto

# --no-compile below relies on it.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup dev environments demo test test-slow test-all mutations chaos invariants test-oldest test-distributed test-recipes test-vllm test-gpu test-gpus test-rl test-wheel docs lint format typecheck proto clean

# $(call install,PROJECTS): this project with some of its optional groups, and the one in rl/. Wheels only and exact versions: nothing is
# built, and no newer torch is ever resolved. Byte code is written when a module is first imported: pip would spend 40 seconds on modules that nobody imports.
define install
@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	echo "Tinsmith needs python3 3.11 or newer; this is $$(python3 --version 2>&1). Put a newer python3 first in PATH." >&2; exit 1; }
@echo "Installing the dependencies into $(VENV). This takes minutes: PyTorch alone is large."
python3 -m venv $(VENV)
$(PYTHON) -m pip install --only-binary :all: --constraint constraints.txt --no-compile $(1)
@touch $@
endef

setup: $(STAMP)

$(STAMP): pyproject.toml rl/pyproject.toml constraints.txt
	$(call install,--editable ./rl --editable '.[$(SERVING_EXTRAS)]')

$(DEMO_STAMP): pyproject.toml constraints.txt
	$(call install,--editable '.[demo]')

dev: $(DEV_STAMP)

$(DEV_STAMP): pyproject.toml rl/pyproject.toml constraints.txt
	$(call install,--editable ./rl --editable '.[dev]')
	@touch $(STAMP) $(DEMO_STAMP) $(LINT_STAMP)

# What lint and format need: seconds, where the rest takes a minute and more.
$(LINT_STAMP): constraints.txt
	python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --only-binary :all: --constraint constraints.txt --no-compile ruff
	@touch $@

demo: $(DEMO_STAMP)
	$(PYTHON) examples/digits.py

# Four processes, of which some always wait for what they have started; one that has no tests left takes some of another's. If one crashes, the run ends with that error. A test's own files are
# deleted at once unless it failed: they would add up to gigabytes.
PYTEST := $(PYTHON) -m pytest --numprocesses 4 --dist worksteal --max-worker-restart 0 -o tmp_path_retention_policy=failed --durations 10
test: $(DEV_STAMP)
	$(PYTEST)

test-slow: export TINSMITH_TEST_ALL := 1
test-slow: $(DEV_STAMP)
	$(PYTEST) -m slow

# Image processors of transformers 5.17 cannot say what is expected without torchvision.
OLDEST := .oldest
test-oldest: $(DEV_STAMP)
	$(PYTHON) -m pip install --quiet --only-binary :all: --no-deps --no-compile --upgrade --target $(OLDEST) transformers==5.17.0 'huggingface_hub<2'
	PYTHONPATH=$(OLDEST) $(PYTEST) tests/kernels tests/models tests/memory tests/rendering tests/training tests/sampling -k 'not equal_the_processors and not values_are_the_processor'

test-all: export TINSMITH_TEST_ALL := 1
test-all: $(DEV_STAMP)
	$(PYTEST)
	$(MAKE) --jobs 2 --output-sync test-recipes test-vllm

# Two at a time; those whose names contain a word: make mutations NAMES="ppo AdamW"
mutations: $(DEV_STAMP)
	$(PYTHON) -m tests.mutations $(NAMES)

# Needs no environment: it only reads the tests' docstrings.
chaos: $(DEV_STAMP)
	$(PYTHON) -m benchmarks.chaos

invariants:
	@python3 -m tests.invariants

test-distributed: $(DEV_STAMP)
	$(PYTHON) -m pytest tests/distributed --durations 0 --durations-min 1

$(RECIPES_STAMP): constraints-recipes.txt
	python3 -m venv $(RECIPES_VENV)
	$(RECIPES_VENV)/bin/python -m pip install --quiet --only-binary :all: --no-deps --no-compile --requirement $<
	@touch $@

# The virtual environments in which recipes and vLLM run.
environments: $(RECIPES_STAMP) $(VLLM_STAMP)

# In order, in one process: the later recipes start from what the earlier ones have trained. With one thread each, server and recipe
# do not wait for each other's threads on a busy machine.
test-recipes: $(DEV_STAMP) $(RECIPES_STAMP)
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest tests/recipes --basetemp recipes-output --timeout 900 --durations 0 --durations-min 1

$(VLLM_STAMP): constraints-vllm.txt
	python3 -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --only-binary :all: --no-deps --no-compile --requirement $<
	@touch $@

test-vllm: $(DEV_STAMP) $(VLLM_STAMP)
	TINSMITH_TEST_VLLM_PYTHON=$(VLLM_VENV)/bin/python $(PYTHON) -m pytest tests/with_vllm --timeout 1200 --durations 0 --durations-min 1

# Needs no registry where an environment is there already: make test-gpu PYTHON=python3 DEV_STAMP=
# Ten processes share the card: most tests are small, and wait for Python. More help on a machine with more cores.
GPU_PROCESSES := 10
test-gpu: SHELL := /bin/bash
test-gpu: $(DEV_STAMP)
	set -o pipefail; mkdir -p benchmarks/results; TINSMITH_TEST_DEVICE=cuda OMP_NUM_THREADS=1 $(PYTHON) -m pytest -p no:cacheprovider -p no:benchmark \
		tests/kernels tests/models tests/memory tests/rendering tests/training tests/sampling tests/gpu --ignore tests/sampling/vllm --ignore tests/sampling/inside_vllm \
		--numprocesses $(GPU_PROCESSES) --dist worksteal --timeout 300 --durations 15 2>&1 | tee benchmarks/results/test-gpu.txt

# As test-gpu, it needs no registry: make test-gpus PYTHON=python3 DEV_STAMP=
# A file of tests at a time in each process. They share the GPUs, and so do the processes and servers that they start.
test-gpus: SHELL := /bin/bash
test-gpus: $(DEV_STAMP)
	set -o pipefail; mkdir -p benchmarks/results; TINSMITH_TEST_DEVICE=cuda OMP_NUM_THREADS=1 $(PYTHON) -m pytest -p no:cacheprovider -p no:benchmark \
		tests/distributed --ignore tests/distributed/test_ray.py --ignore tests/distributed/test_meeting.py \
		tests/sampling/vllm/test_transfers.py tests/sampling/inside_vllm/test_transfer_group.py \
		--numprocesses 7 --dist loadfile --max-worker-restart 0 --timeout 240 --durations 15 2>&1 | tee benchmarks/results/test-gpus.txt

# The adapters for the cookbook are tested with the one that test-recipes installs.
test-rl: $(DEV_STAMP) $(RECIPES_STAMP)
	PYTHONPATH=$$(echo $(RECIPES_VENV)/lib/python3*/site-packages) $(PYTHON) -m pytest tests/rl/test_tinker_cookbook.py
	OMP_NUM_THREADS=2 $(PYTHON) -m pytest tests/rl_runs --durations 0 --durations-min 1

# From another folder, so that nothing but the wheels can be imported. For several: make test-wheel WHEEL_PYTHONS="python3.11 python3.12 python3.13"
WHEEL_PYTHONS := python3
test-wheel:
	rm -rf dist
	set -e; for python in $(WHEEL_PYTHONS); do \
		rm -rf $(WHEEL_VENV); $$python -m venv $(WHEEL_VENV); \
		$(WHEEL_VENV)/bin/python -m pip wheel --quiet --no-deps --wheel-dir dist . ./rl; \
		$(WHEEL_VENV)/bin/python -m pip install --quiet --only-binary :all: --constraint constraints.txt --no-compile \
			dist/tinsmith_rl-*.whl "$$(echo dist/tinsmith-*.whl)[demo]"; \
		(cd dist && ../$(WHEEL_VENV)/bin/python ../examples/digits.py); done

docs: export NO_MKDOCS_2_WARNING := 1
docs: $(DEV_STAMP)
	$(PYTHON) -m mkdocs build --strict --quiet

lint: $(LINT_STAMP)
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check

format: $(LINT_STAMP)
	$(PYTHON) -m ruff check --fix-only
	$(PYTHON) -m ruff format

typecheck: $(DEV_STAMP)
	$(PYTHON) -m mypy

proto: $(DEV_STAMP)
	$(PYTHON) -m grpc_tools.protoc --proto_path=. --python_out=. --pyi_out=. $(PROTO)

clean:
	rm -rf $(VENV) $(RECIPES_VENV) $(VLLM_VENV) $(WHEEL_VENV) $(OLDEST) demo-output recipes-output rl-output site build dist *.egg-info rl/build rl/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
