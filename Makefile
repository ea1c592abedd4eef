# make test: the whole suite.   make unit: its quick part.   make demo: watch it happen.   make check: style and types.
# Each installs into .venv what it needs, once; a changed pyproject.toml, setup.py or kernel source installs again.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
BUILT_FROM := pyproject.toml $(wildcard setup.py src/jettison/device/kernels/build.py src/jettison/device/kernels/csrc/*)

# Bugs that were found under faults, each by name (docs/reliability.md tells them): make reproduce-NAME runs the test of one.
REPRODUCTIONS := lost-input
lost-input := tests/core/test_recovering.py::test_a_step_that_lost_its_input_ends_no_request

# One more than there are cores: tests with processes of their own wait for these a part of their time.
TEST_PROCESSES ?= $(shell $(PYTHON) -c 'import os; print(len(os.sched_getaffinity(0)) + 1)')
UNIT := $(addprefix tests/,test_config.py cost core house memory policy report transport workload)

# Where it is set each of the suite's many processes compiles all that it imports anew, and rewrites all test modules.
export PYTHONDONTWRITEBYTECODE :=

.DELETE_ON_ERROR:
.PHONY: help install test test-clients test-front-ends unit check claims lint types demo gpu-check gpu-wheels clean $(addprefix reproduce-,$(REPRODUCTIONS))

help:
	@echo "make install install into .venv"
	@echo "make test    run the whole suite on all cores"
	@echo "make test-clients  run real clients against a server; those with pins of their own get environments of theirs"
	@echo "make test-front-ends  run the tests of HTTP with one front end before each server, and with two"
	@echo "make unit    run what needs no processes, on all cores: about a minute"
	@echo "make demo    make a small model, serve it with little memory, play a day on it, plainly and elastically"
	@echo "make reproduce-NAME  run the test of one bug (docs/reliability.md)"
	@echo "make claims  which measured figures are of this code, and which of older; ARGS=--write: README's table anew"
	@echo "make gpu-check  all that one card can show, in under nine minutes; needs PyTorch and Triton there, no network"
	@echo "make gpu-wheels  what a bare image lacks for it, into .whl, to be carried there"
	@echo "make check   ruff and mypy"
	@echo "make clean   remove what was built, .venv included"

install: $(VENV)/installed

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) $(ARGS)

# GuideLLM and the like: each is installed once, into .venv-clients, in at most two minutes.
CLIENT_TESTS := $(addprefix tests/,server/test_langchain.py server/test_litellm.py server/test_recorded_clients.py \
	server/test_openai_sdk.py server/test_messages.py server/test_responses.py server/test_public_reports.py \
	e2e/test_guidellm.py e2e/test_lm_eval.py e2e/test_openai_sdk.py)

test-clients: $(VENV)/installed-dev
	JETTISON_CLIENTS=1 $(BIN)/python -m pytest -n auto $(CLIENT_TESTS) $(ARGS)

test-front-ends: $(VENV)/installed-dev
	for number in 1 2; do \
		JETTISON_TEST_API_SERVERS=$$number $(BIN)/python -m pytest -n auto tests/server $(ARGS) || exit; \
	done

# What needs no processes of its own, on all cores: to be run after every change.
unit: $(VENV)/installed-dev
	$(BIN)/python -m pytest -n auto -m "not slow and not live" $(UNIT) $(ARGS)

claims: $(VENV)/installed
	$(BIN)/python -m benchmarks.claims $(ARGS)

check: lint types

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .

types: $(VENV)/installed-dev
	$(BIN)/mypy

gpu-check:
	$(PYTHON) -m benchmarks gpu check $(ARGS)

GPU_PYTHON := 3.12
# typer: pyproject's range excludes the image's, and later ones need pydantic.
GPU_WHEELS := msgspec starlette uvicorn uvloop httptools python-multipart pytest-asyncio pytest-xdist execnet \
	sortedcontainers xxhash backports.zstd prometheus-client tokenizers safetensors 'typer<0.27' annotated-doc \
	shellingham rich markdown-it-py mdurl pygments pyyaml jinja2 markupsafe gguf tqdm llguidance jsonschema \
	jsonschema-specifications attrs referencing rpds-py

gpu-wheels: $(VENV)/installed
	$(PIP) download --quiet --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) --dest .whl \
		$(foreach tag,manylinux2014_x86_64 manylinux_2_17_x86_64 manylinux_2_28_x86_64,--platform $(tag)) $(GPU_WHEELS)

demo: $(VENV)/installed
	$(BIN)/jettison demo $(ARGS)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(BUILT_FROM) | $(BIN)/python
	$(PIP) install -e .
	@touch $@

$(VENV)/installed-dev: $(BUILT_FROM) | $(BIN)/python
	$(PIP) install -e '.[dev]'
	@touch $(VENV)/installed $@

$(addprefix reproduce-,$(REPRODUCTIONS)): reproduce-%: $(VENV)/installed-dev
	$(BIN)/python -m pytest $($*)

clean:
	rm -rf $(VENV) .venv-clients build dist demo src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f src/jettison/device/kernels/*.so
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
