# Two commands do everything: `make run` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# For what pip installs and for the isolated builds that it starts; older and newer versions of pip read either.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
SOURCES := CMakeLists.txt pyproject.toml constraints.txt $(wildcard src/native/*)

.PHONY: run install test test-slow lint types bench clean

run: install
	$(BIN)/headrace pull smollm2:135m
	$(BIN)/headrace run --model smollm2:135m --greedy --max-tokens 120 --prompt "Why is the sky blue?"

install: $(VENV)/installed

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(BIN)/python $(SOURCES)
	$(PIP) install --progress-bar on -e .
	touch $@

$(VENV)/tested: $(VENV)/installed
	$(PIP) install -q -e ".[test]"
	touch $@

test: $(VENV)/tested lint types
	$(BIN)/headrace pull smollm2:135m
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(VENV)/tested
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/tested
	$(BIN)/mypy

bench: $(VENV)/installed
	$(PIP) install -q -e ".[bench]"
	$(BIN)/python -m bench

clean:
	rm -rf $(VENV) build dist
