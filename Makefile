# Every target does its own set-up: a virtual environment in .venv, once.
#
#   make demo      text from the demo model, its experts streamed by the expert daemon
#   make test      format, rules, types, import contracts and tests
#   make accept    the long checks
#   make sanitize  compute-sanitizer over all kernels, on an NVIDIA GPU
#   make bench     speed of the demo model on this machine
#   make lint      format, rules, types and import contracts only
#   make format    let ruff rewrite the files
#   make clean     remove .venv and what tools left behind
#
# Variables: PYTHON (the interpreter to start from), TORCH (what pip is asked for as torch),
# TORCH_INDEX (a package index to take torch from), VENV, ARGS (more arguments for demo and pytest),
# WORKERS (how many tests run at a time; most of them wait for processes).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: all setup demo test accept sanitize bench lint format clean

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
ARGS ?=
WORKERS ?= 2
# A bare `torch` is a CUDA build of several gigabytes: ask for it only where there is a GPU for it.
TORCH ?= $(if $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null),torch>=2.11,torch==2.13.0)

bin := $(VENV)/bin
pip := $(bin)/python -m pip install --quiet --disable-pip-version-check
ready := $(VENV)/.ready

all: setup
	@sed -n '3,11s/^#//p' Makefile

setup: $(ready)

$(ready): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "headrace needs Python 3.11 or newer: make PYTHON=python3.11 (found: $$($(PYTHON) --version 2>&1))"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments: install python3-venv (Debian, Ubuntu) first"; exit 1; }
	@echo "setting up $(VENV) with $(TORCH)$(if $(TORCH_INDEX), from $(TORCH_INDEX)); this happens once"
	@$(bin)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@$(pip) $(if $(TORCH_INDEX),--index-url '$(TORCH_INDEX)') '$(TORCH)'
	@$(pip) --editable '.[test]'
	@touch $@

demo: setup
	@prompt=$$'KING HENRY.\nMy lords,'; printf '%s' "$$prompt"; \
	$(bin)/headrace generate --model demo "$$prompt" \
	  --max-tokens 120 --temperature 0.8 --top-p 0.9 $(ARGS)

# Tests that compare times have the machine to themselves. With ARGS a part may select no test (5).
part := not gpu and not accept and not interpreter
spread := -n $(WORKERS) --dist worksteal
none_is_well = $(if $(ARGS),|| [ $$? = 5 ])

test: lint
	$(bin)/pytest $(spread) -m '$(part) and not timing' $(ARGS) $(none_is_well)
	$(bin)/pytest -m '$(part) and timing' $(ARGS) $(none_is_well)
	TRITON_INTERPRET=1 $(bin)/pytest $(spread) -m interpreter tests/kernels

accept: setup
	$(bin)/pytest -m 'accept and not gpu' --timeout 3600 $(ARGS)

sanitize: setup
	$(bin)/python tests/support/sanitize.py $(ARGS)

bench: setup
	$(bin)/python bench/generate.py $(ARGS)

lint: setup
	$(bin)/ruff format --check .
	$(bin)/ruff check .
	$(bin)/mypy
	$(bin)/lint-imports --no-logo

format: setup
	$(bin)/ruff format .
	$(bin)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
