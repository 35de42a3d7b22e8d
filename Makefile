# Every command a user needs. Each target installs what it needs first; `make` alone lists them.
#
#   make train NPROC=4 CONFIG=train_configs/debug.toml ARGS="--training.steps 20"

PYTHON ?= python3
CONFIG ?= train_configs/debug.toml
ARGS ?=
# What the sample of text at the end of `make train` begins with.
PROMPT ?= It was
# Ranks on this machine. Empty: one per GPU, or one where there is none.
NPROC ?=

BIN := .venv/bin
STAMP := .venv/.installed
TYPED := torchtitan_lite train.py scripts
PRINT_FOLDER := import sys; from torchtitan_lite.config import load_config; \
    print(load_config(sys.argv[1:]).job.dump_folder)
IS_RECENT := import sys; sys.exit(sys.version_info < (3, 10))

.DEFAULT_GOAL := help
.PHONY: help train test test-all venv lint format clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' Makefile

# One rank needs no launcher, and torch then uses every core; torchrun gives each rank one thread.
train: venv ## train CONFIG on NPROC ranks, with ARGS added to the command line
	@ranks="$(NPROC)"; \
	[ -n "$$ranks" ] || ranks=$$($(BIN)/python -c \
	    "import torch; print(max(1, torch.accelerator.device_count()))") || exit 1; \
	case "$$ranks" in \
	    1) launcher="$(BIN)/python" ;; \
	    *) launcher="$(BIN)/torchrun --standalone --nproc_per_node $$ranks" ;; \
	esac; \
	set -x; $$launcher train.py --job.config_file $(CONFIG) $(ARGS)
	@run=$$($(BIN)/python -c "$(PRINT_FOLDER)" --job.config_file $(CONFIG) $(ARGS)) && \
	printf '%-22s %s\n' \
	    "every logged step" "$$run/metrics.jsonl" \
	    "draw the curves" "$(BIN)/python scripts/plot_run.py $$run" && \
	if [ -d "$$run/checkpoint" ]; then printf '%-22s %s\n' \
	    "checkpoints" "$$run/checkpoint/" \
	    "train on from here" "the same command on any mesh, with a larger --training.steps" \
	    "" "(the decay of the learning rate then stretches; --lr_scheduler.total_steps fixes it)" \
	    "start another run" "with another --job.dump_folder" \
	    "a sample of its text" "(scripts/generate.py, docs/generation.md)"; \
	    $(BIN)/python scripts/generate.py --checkpoint "$$run/checkpoint" --prompt "$(PROMPT)" \
	        --max_new_tokens 100 --temperature 0.8 || echo "(no sample of this model)"; fi

test: venv ## run the suite on CPU
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

test-all: venv ## run the suite with its slow proofs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m ""

venv: $(STAMP) ## make .venv and install, once (PYTHON=... chooses the interpreter)

# The stamp is written last, so an install that was cut short is taken up again.
$(STAMP): pyproject.toml constraints.txt
	@$(BIN)/python -c "$(IS_RECENT)" 2>/dev/null || $(PYTHON) -c "$(IS_RECENT)" 2>/dev/null || { \
	    echo "Python 3.10 or newer is needed; $(PYTHON) is" \
	        "$$($(PYTHON) --version 2>/dev/null || echo not there)." \
	        "Name another, as in  make venv PYTHON=python3.12" >&2; exit 1; }
	@$(BIN)/python -c "$(IS_RECENT)" 2>/dev/null || $(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $(STAMP)

lint: venv ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(TYPED)

format: venv ## rewrite the sources in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv, caches and build leftovers; outputs/ stays
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
