# Everything a person runs is one word. A second call of anything costs nothing that the first has done.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help

PYTHON ?= python3.11
UV_VERSION := 0.13.9
VENV := .venv
BIN := $(VENV)/bin
KAFKA_LIBS := $(or $(HEADRACE_KAFKA_LIBS),.headrace/kafka-libs)

help: ## this list
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*##/:/' | column -t -s:

setup: $(VENV)/.ready $(KAFKA_LIBS)/.ready ## venv with pinned packages, Kafka's jars

demo: $(VENV)/.ready $(if $(HEADRACE_KAFKA__BOOTSTRAP_SERVERS),,$(KAFKA_LIBS)/.ready) ## everything on this machine, with a mixed load; ONCE=1 ends by itself
	@exec $(BIN)/python -m headrace demo $(if $(ONCE),--once) $(ARGS)

# Two at a time: most tests wait for a server or a session to time out. Real engines stay on one side (tests/conftest.py).
test: setup ## every test
	@exec $(BIN)/python -m pytest -n 2 --dist loadgroup $(ARGS)

faults: setup ## every fault, all rounds: build/faults.jsonl, benchmarks/RESULTS.md
	@exec $(BIN)/python -m tests.faults $(ARGS)

bench: setup ## speed against peers: build/bench.jsonl, benchmarks/RESULTS.md; ARGS='pipeline --runs 1' for a part
	@exec $(BIN)/python -m benchmarks $(ARGS)

check: $(VENV)/.ready ## format, lint, types, layers, unit tests; under a minute
	@$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/unit

format: $(VENV)/.ready ## mend what can be mended by machine
	@$(BIN)/ruff check --fix-only -q .
	$(BIN)/ruff format .

pins: $(VENV)/.ready ## solve pyproject.toml into requirements/dev.txt anew, and the benchmarks' peers
	@$(BIN)/uv pip compile --python $(BIN)/python --override requirements/overrides.txt --extra cpu --extra dev \
	  --no-emit-index-url --no-header --no-annotate pyproject.toml -o requirements/dev.txt
	$(BIN)/uv pip compile --python $(BIN)/python --no-emit-index-url --no-header --no-annotate \
	  requirements/peers.in -o requirements/peers.txt

# requirements/dev.txt is solved whole, so nothing is solved again here.
$(VENV)/.ready: requirements/dev.txt pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet uv==$(UV_VERSION)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps -r requirements/dev.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps -e .
	touch $@

# What benchmarks are measured against; made when a benchmark first needs it.
.venv-peers/.ready: requirements/peers.txt | $(VENV)/.ready
	@$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-peers
	$(BIN)/uv pip install --quiet --python .venv-peers/bin/python --no-deps -r requirements/peers.txt
	touch $@

$(KAFKA_LIBS)/.ready: deploy/kafka/pom.xml
	@deploy/kafka/bring-jars $(KAFKA_LIBS)
	touch $@

.PHONY: help setup demo test faults bench check format pins
