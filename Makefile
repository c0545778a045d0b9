# Everything from a fresh clone: each target sets up what it needs in $(VENV), once.
PYTHON ?= python3
VENV   ?= .venv
# Development pins this release. TORCH="torch==2.11.0" and the like choose another one.
TORCH  ?= torch==2.13.0
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip install --quiet --no-compile --disable-pip-version-check
JOBS   ?= 2
# One thread per test process: several would fight for the cores, and sums split over threads are not repeatable.
ONE_THREAD := OMP_NUM_THREADS=1
# Keep compiled Python files, in the environment: without them every process spends 3 s more on `import torch`.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX := $(abspath $(VENV))/bytecode

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-ascend test-matrix test-chaos lint format bench conformance clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 12

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 10) <= sys.version_info < (3, 14) else "ditorch needs Python 3.10 to 3.13, this is " + sys.version.split()[0])'
	@echo "==> creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.ready-run: pyproject.toml | $(PY)
	@echo "==> installing ditorch and $(TORCH) into $(VENV) (about a minute)"
	@$(PIP) "$(TORCH)" -e .
	@touch $@

$(VENV)/.ready-dev: pyproject.toml | $(PY)
	@echo "==> installing ditorch, $(TORCH) and the development tools into $(VENV) (about a minute)"
	@$(PIP) "$(TORCH)" -e '.[dev]'
	@touch $@ $(VENV)/.ready-run

demo: $(VENV)/.ready-run  ## a CUDA script, unmodified, on this machine's device
	@$(PY) -m demo

test: $(VENV)/.ready-dev  ## the tests, on this machine's default device
	@echo "==> running the tests"
	@$(ONE_THREAD) $(PY) -m pytest -q -n $(JOBS) -m "not slow" tests

test-all: $(VENV)/.ready-dev  ## the tests and the long sweeps over PyTorch's operator database
	@$(ONE_THREAD) $(PY) -m pytest -q -n $(JOBS) --dist worksteal tests

ASCEND := .venv-ascend
test-ascend:  ## the device layer on the real torch_npu wheel, without a chip (an environment of its own)
	@test -x $(ASCEND)/bin/python || $(PYTHON) -m venv $(ASCEND)
	@echo "==> installing torch and torch_npu into $(ASCEND) (about two minutes)"
	@$(ASCEND)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check \
		torch==2.13.0 numpy rich pyyaml hypothesis expecttest 'pytest>=8' pytest-timeout
	@$(ASCEND)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --no-deps torch_npu==2.13.0 \
		|| echo "==> no wheel of torch_npu for this machine: the tests will be skipped"
	@TEST_ASCEND=$(ASCEND)/host_acl DITORCH_DEVICE=cpu TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(ONE_THREAD) \
		$(ASCEND)/bin/python -m pytest -q -rs -p no:warnings tests/vendor/ascend

test-matrix:  ## a quick suite for each version of PyTorch and Python (ARGS="--torch 2.10.0 --python 3.12" and the like)
	@$(PYTHON) -m tests.matrix $(ARGS)

test-chaos: $(VENV)/.ready-dev  ## kills, full disks, hostile files: minutes, bounded (ARGS="--kills 100 --captures 10000 --seed 1")
	@$(ONE_THREAD) $(PY) -m tests.chaos $(ARGS)

# What checks the types of the page's JavaScript; where there is no npm, lint says so and goes on.
TSC := $(VENV)/node/node_modules/.bin/tsc
lint: $(VENV)/.ready-dev  ## ruff, mypy, the import contract and the types of the page's JavaScript
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/lint-imports --no-cache
	@if test -x $(TSC) || { command -v npm >/dev/null && npm install --silent --no-fund --no-audit --prefix $(VENV)/node typescript@5; }; \
	then $(TSC) -p ditorch_common/page && echo "JavaScript: types are right"; \
	else echo "JavaScript is not checked: npm is not installed, or has no typescript"; fi

format: $(VENV)/.ready-dev  ## format the code
	@$(VENV)/bin/ruff check --fix --quiet . || true
	@$(VENV)/bin/ruff format .

bench: $(VENV)/.ready-dev  ## the benchmarks of docs/benchmarks.md
	@$(PY) -m benchmarks

conformance: $(VENV)/.ready-dev  ## how much of PyTorch this machine's device does (ARGS="--ops add" and the like)
	@$(PY) -m ditorch conformance $(ARGS)

clean:  ## remove the virtual environment and what was generated
	rm -rf $(VENV) $(ASCEND) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info demo_results conformance_results
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
