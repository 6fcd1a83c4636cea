# make demo      install what is needed and watch a small cluster answer
# make venv      .venv with everything that development needs, pinned
# make check     lint, types, import contract, gRPC API and its stubs
# make format    ruff's fixes and formatting
# make test      all tests
# make security  look at the chart's objects and the image with checkov
# make bench     measure this machine
# make losses    lose members of an elastic group many times, and measure what it costs
# make gpu       run the GPU kernels' numerics and measure them against the card
# make clean     remove .venv, builds and caches

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Another build of torch (CPU only, another CUDA): the URL of an index that carries it
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help venv demo check format test security losses bench gpu clean

help:
	@sed -n 's/^# //p' Makefile | head -10

venv: $(VENV)/.dev

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: install it, or say PYTHON=/path/to/python" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than 3.11: say PYTHON=/path/to/python3.11" >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)

# torch comes first and alone: the index it comes from may be another one
$(VENV)/.run: pyproject.toml | $(BIN)/python
	@version=$$(sed -n 's/^ *"torch==\([0-9.]*\)".*/\1/p' pyproject.toml); \
	$(BIN)/python -c "import sys, importlib.metadata as m; sys.exit(m.version('torch').split('+')[0] != '$$version')" 2>/dev/null || \
		$(PIP) install -q $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX) --no-deps) torch==$$version
	$(PIP) install -q -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	$(PIP) install -q -e '.[dev]'
	@touch $@

demo: $(VENV)/.run
	$(BIN)/pd-cluster demo

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pd_cluster.rpc.generate --check
	$(BIN)/buf lint
	$(BIN)/buf breaking --against proto/baseline.json

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: $(VENV)/.dev
	$(BIN)/python -m pytest

TOOLS := $(or $(PD_CLUSTER_TOOLS),$(HOME)/.cache/pd-cluster/tools)

$(TOOLS)/checkov/bin/checkov: | $(BIN)/python
	"$(PYTHON)" -m venv $(TOOLS)/checkov
	$(TOOLS)/checkov/bin/python -m pip --disable-pip-version-check install -q checkov==3.3.30

# what the chart's objects and the image would be reproached with, by checkov
security: $(VENV)/.dev $(TOOLS)/checkov/bin/checkov
	$(BIN)/python -m pytest tests/deploy/test_security.py

# members of an elastic group lost many times, at moments drawn by chance
losses: $(VENV)/.dev
	PD_CLUSTER_LOSSES=25 $(BIN)/python -m pytest -s tests/faults/test_rank_loss_processes.py tests/faults/test_rank_cut_off.py

bench: $(VENV)/.run
	$(BIN)/pd-cluster bench transfer

# on a machine with a CUDA device, with a torch built for it: see TORCH_INDEX above
gpu: $(VENV)/.dev
	$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "make gpu needs a CUDA device and a torch built for it")'
	TRITON_INTERPRET=0 $(BIN)/python -m pytest $(wildcard tests/numerics/test_triton_*.py)
	$(BIN)/python -m pd_cluster.bench.gpu

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
