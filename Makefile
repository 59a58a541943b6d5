# Each target does the set-up that it needs; `make setup` does nothing while what is installed is current.
# Options of a recipe go into ARGS: make train ARGS="max_steps=20 group_size=8"

PYTHON := .venv/bin/python

# checks and tests use only what is installed
check check-security fast paths rest again: export HF_HUB_OFFLINE := 1

# bytecode of what is imported is kept wherever this runs: without it, every start of vLLM or torch compiles them anew
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup train test test-all check static check-security types strict-types fast paths rest again format lint imports size pythons test-android test-harnesses test-ship record-clients setup-tinker test-tinker test-cookbook monitor migration bench

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1 - \2/p' Makefile

setup: ## install everything into .venv
	@scripts/setup.sh

train: setup ## train; with no ARGS, the tiny model on the simulated phone
	@$(PYTHON) -m cua_rl.recipes.train $(ARGS)

check: setup ## format, lint, types, import direction, size, fast tests: before every commit
	@$(MAKE) --no-print-directory --jobs=2 --keep-going --output-sync=target fast types format lint imports size

static: setup # what `check` has besides tests, and pyright
	@$(MAKE) --no-print-directory --jobs=2 --keep-going --output-sync=target strict-types types format lint imports size

types:
	.venv/bin/pyrefly check --output-format=min-text

strict-types: setup ## types once more with pyright, which infers more and takes a minute: before every push
	.venv/bin/pyright

# many tests wait for sockets, processes and time limits: more processes than cores, each of which imports everything
fast:
	$(PYTHON) -m pytest -q --numprocesses=3 --dist=worksteal --ignore=tests/real

format:
	.venv/bin/ruff format --check .

lint:
	.venv/bin/ruff check .

imports:
	.venv/bin/lint-imports

size:
	$(PYTHON) -m scripts.code_size

# the tests of paths wait for one model server, one after the other: the fast ones use the time
test: setup ## fast tests, and a test with the real thing for each part and path: before every push
	@$(MAKE) --no-print-directory --jobs=2 --keep-going paths fast

test-all: test ## all tests, each once: when server, trainer, database, monitor or processes change
	@$(MAKE) --no-print-directory rest

# tests of one file share a browser or a database, some of all files a model server: tests/groups.py, which also names
# the test of each path
REAL := $(PYTHON) -m pytest -q --numprocesses=4 --dist=loadgroup --no-loadscope-reorder

paths:
	$(REAL) $$($(PYTHON) -m tests.groups)

rest:
	$(REAL) tests/real --ignore=tests/real/harnesses $$($(PYTHON) -m tests.groups --deselect)

again: ## run the tests that failed last once more, one after the other
	$(PYTHON) -m pytest -q --last-failed --last-failed-no-failures=none

check-security: setup ## attack a small run in the ways of docs/security.md, and print what held; as root, also as other users
	@$(PYTHON) -m scripts.red_team $(ARGS)

pythons: setup ## resolve what is installed for every Python that is supported; needs a package index
	@scripts/lock.sh --check

test-android: setup ## tests on an attached Android phone or emulator, whose settings they change
	$(PYTHON) -m pytest -q tests/real/android

# the validators pin versions that others of .venv do not go with, so they have an environment of their own
.venv-ship/.done: constraints/ship.txt
	.venv/bin/python -m venv .venv-ship
	.venv-ship/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --only-binary :all: -r constraints/ship.txt
	touch $@

test-ship: setup .venv-ship/.done ## validate Dockerfile, compose, Slurm, Kubernetes, Ray and SkyPilot files; try nginx.conf
	$(PYTHON) -m pytest -q deploy

setup-tinker: setup ## make the environments of the tinker SDK, one for each version that is tested
	@scripts/tinker_environments.sh

# with the newest SDK all of it, with older ones whether all checks pass on a right server
test-tinker: setup-tinker ## try the conformance suite for Tinker servers with each version of the SDK
	.venv/bin/pyrefly check --config tinker_conformance/pyproject.toml --output-format=min-text
	.venv-tinker/bin/python -m pytest -q tinker_conformance
	for python in .venv-tinker-*/bin/python; do $$python -m pytest -q tinker_conformance -k right_server & all="$$all $$!"; done; \
		for one in $$all; do wait $$one || exit; done

# takes what its lock does not name, torch, from the environment of the SDK
.venv-cookbook/.done: constraints/cookbook.txt constraints/tinker.txt
	.venv/bin/python -m venv .venv-cookbook
	.venv-cookbook/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --require-hashes --only-binary :all: -r constraints/cookbook.txt
	echo $(CURDIR)/.venv-tinker/lib/python3*/site-packages > "$$(echo .venv-cookbook/lib/python3*/site-packages)/tinker.pth"
	touch $@

test-cookbook: setup-tinker .venv-cookbook/.done ## train with recipes of tinker-cookbook on the Tinker service
	$(PYTHON) -m pytest -q tests/real/tinker/test_cookbook.py

record-clients: setup ## record again what client libraries send to the gateway; needs package indexes and node
	$(PYTHON) -m tests.sampling.clients.record $(ARGS)

monitor: setup ## show training runs in the browser
	@$(PYTHON) -c "import importlib.util as u, sys; sys.exit(not u.find_spec('cua_rl.recipes.serve_monitor'))" \
		|| { echo "make monitor: cua_rl.recipes.serve_monitor is not part of this version" >&2; exit 2; }
	@$(PYTHON) -m cua_rl.recipes.serve_monitor $(ARGS)

test-harnesses: setup ## make the environments of examples/harnesses, train a step through each and on a site, let 100 of 500 programs die
	@for name in browsergym gymnasium inspect_ai openenv verifiers; do examples/harnesses/make_environment.sh $$name || exit; done
	-@examples/harnesses/make_environment.sh harbor # which not every machine has the Python for
	CUA_RL_HARNESS_ROLLOUTS=500 $(PYTHON) -m pytest -q tests/real/harnesses tests/agent/test_harness_faults.py

bench: setup ## quick benchmarks: figures into benchmarks/results.jsonl and docs/dev/performance.md
	$(PYTHON) -m benchmarks.run $(ARGS)

migration: setup ## draft a database migration after a change of the models: make migration MESSAGE="describe changes"
	@test -n "$(MESSAGE)" || { echo 'make migration: expected MESSAGE="describe changes", got none' >&2; exit 2; }
	cd cua_rl && ../.venv/bin/alembic revision --autogenerate -m "$(MESSAGE)"
