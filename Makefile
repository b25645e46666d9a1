# Both goals set up everything they need in .venv: `make demo` serves a real model, `make test` proves the tree.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
EXTRAS_DEMO := build
EXTRAS_TEST := build,bench,dashboard,dev,openai,plugin-build,tracing

.PHONY: demo test lint unit peers proto clean

demo: $(VENV)/.demo
	$(BIN)/dcut-trt demo

test: lint unit

lint: $(VENV)/.test
	$(BIN)/pre-commit run --all-files --show-diff-on-failure

# TensorRT's compiler gets a process of its own: it has crashed in one that had loaded the other runtimes before.
unit: $(VENV)/.test peers
	$(BIN)/pytest tests/tensorrt
	$(BIN)/pytest --ignore=tests/tensorrt

# The other sides that the frontends are tried with; each script sets up what is missing and is quick otherwise.
peers: $(VENV)/.test
	@for script in tests/tritonserver/setup.sh tests/dynamo/setup.sh tests/dashboard/setup.sh; do \
	  if [ -f $$script ]; then bash $$script || exit 1; fi; done

# Regenerates the committed gRPC stubs from proto/.
proto: $(VENV)/.test
	$(BIN)/python -m dcut_server.generate_stubs

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/pip
	$(PIP) install --quiet --constraint constraints.txt --editable '.[$(EXTRAS_DEMO)]'
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(BIN)/pip
	$(PIP) install --quiet --constraint constraints.txt --editable '.[$(EXTRAS_TEST)]'
	@touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) bundles build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
