# make retool     train a tiny GPT-OSS with a Python tool, end to end (the main job); ALGORITHM=ppo for PPO
# make gsm8k      the same without a tool, on word problems
# make verify_if  the same without a tool, on instructions that a program checks
# make test       lint, import contract, docs' code blocks, unit and distributed tests
# make test-slow  the full grids, real data, several seeds
# make test-vllm  against a real vLLM on CPU, in an environment of its own (3.8 GB)
# make wheels     sdist, pure wheel and, where nvcc is, the platform wheel, into dist/
# make docs       the documentation site, into site/
SHELL := /bin/bash
PY    := .venv/bin/python
SEED  ?= 0
ALGORITHM ?= grpo
RECIPE := configs/recipes/$(if $(filter ppo,$(ALGORITHM)),tiny_ppo,tiny).yaml
OUT   ?= outputs/retool-tiny$(if $(filter ppo,$(ALGORITHM)),-ppo)
ARGS  ?=
# A thread that waits for another one sleeps: counting instead takes the core from whoever needs it (docs/quickstart.md).
export OMP_WAIT_POLICY ?= passive
GPU   := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -c GPU)
ACCEL ?= configs/accelerate/$(if $(filter-out 0,$(GPU)),single_gpu,cpu).yaml

.PHONY: retool gsm8k verify_if setup-tasks test test-slow test-vllm lint setup setup-dev wheels docs constraints clean

setup:
	@scripts/setup_env.sh
setup-tasks:
	@scripts/setup_env.sh tasks
setup-dev:
	@scripts/setup_env.sh dev,peft

retool: setup
	.venv/bin/accelerate launch --config_file $(ACCEL) examples/retool.py \
	  --config $(RECIPE) --algorithm $(ALGORITHM) --output_dir $(OUT) --seed $(SEED) $(ARGS)

gsm8k: setup
	.venv/bin/accelerate launch --config_file $(ACCEL) examples/gsm8k.py \
	  --config configs/recipes/tiny_gsm8k.yaml --seed $(SEED) $(ARGS)

verify_if: setup-tasks
	.venv/bin/accelerate launch --config_file $(ACCEL) examples/verify_if.py \
	  --config configs/recipes/tiny_verify_if.yaml --seed $(SEED) $(ARGS)

lint: setup-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/lint-imports

test: lint
	$(PY) -m pytest -q --markdown-docs docs README.md
	$(PY) -m pytest -q -m "not slow" $(ARGS)

test-slow: lint
	$(PY) -m pytest -q -m "slow" $(ARGS)
	$(MAKE) test-vllm

test-vllm: setup-dev
	scripts/setup_vllm_env.sh
	TRL_GPTOSS_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python $(PY) -m pytest -q -m slow tests/vllm $(ARGS)

wheels: setup-dev
	PYTHON=$(PY) scripts/build_wheels.sh dist

docs:
	@scripts/setup_env.sh dev,docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

constraints: setup-dev
	{ head -2 constraints.txt; $(PY) -m pip freeze --exclude-editable | sed 's/+cpu$$//'; } > constraints.new
	mv constraints.new constraints.txt

clean:
	rm -rf .venv .venv-vllm build dist site .pytest_cache .ruff_cache .import_linter_cache
