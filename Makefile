# `make` says what there is. Each target creates what it needs, .venv included.

PYTHON ?= python3
# For a machine whose package index has CUDA builds only: make PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PIP_FLAGS ?=

# The versions to use, in an environment of their own: make test-fast CONSTRAINTS=constraints-2.14.txt makes .venv-2.14
CONSTRAINTS ?= constraints.txt

# Of `make fuzz`: how many programs, the seed of the first one, and the file of results.
PROGRAMS ?= 1000
SEED ?= 0
RESULTS ?= fuzz.jsonl
COMMIT ?= $(shell git rev-parse --short HEAD)

VENV := .venv$(patsubst constraints%.txt,%,$(CONSTRAINTS))
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
BROWSER := chromium-headless-shell
UNPACKED := $(VENV)/chromium
export CHROMIUM ?= $(firstword $(foreach name,chromium $(BROWSER) google-chrome,$(shell command -v $(name))))
SOURCES := $(wildcard autoshard passes tests examples benchmarks)

export OMP_NUM_THREADS := 1
unexport PYTHONDONTWRITEBYTECODE  # tests start many processes, each of which would compile all sources

.PHONY: help demo test pytest test-fast test-extended test-browser test-models gpu-check fuzz fuzz-table lint types clean
.DEFAULT_GOAL := help

help: ## what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(INSTALLED) ## train a small GPT on 4 CPU processes, mesh dp=2,tp=2
	@$(BIN)/python examples/train_gpt.py

test: $(INSTALLED) ## lint, types and tests: half an hour to an hour on two cores
	$(BIN)/ruff check $(SOURCES)
	@$(MAKE) --no-print-directory --jobs=2 types pytest

pytest: $(INSTALLED)
	$(BIN)/python -m pytest -q -n 3 --dist worksteal

test-fast: $(INSTALLED) ## the tests that take a few seconds at most and start no processes: about eight minutes on two cores
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow and not gloo and not browser and not extended"

test-extended: $(INSTALLED) ## what `make test` leaves out: long tests of the search, and further cases of others
	$(BIN)/python -m pytest -q -n 3 --dist worksteal -m "extended and not browser"

test-browser: $(INSTALLED) ## open the page of a plan in a headless Chromium: CHROMIUM=path, one on PATH, Debian's, or playwright's
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e ".[test,browser]"
	test -n "$(CHROMIUM)" || $(MAKE) $(UNPACKED)/chromium || $(BIN)/python -m playwright install chromium
	CHROMIUM="$${CHROMIUM:-$$(ls $(CURDIR)/$(UNPACKED)/chromium 2>/dev/null)}" $(BIN)/python -m pytest -q -m browser

test-models: $(INSTALLED) ## train the models of docs/models.md, the fast half, on simulated ranks: ten minutes on two cores
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c $(CONSTRAINTS) -e ".[models]"
	$(BIN)/python -m benchmarks.models --fast

gpu-check: $(INSTALLED) ## on a machine with GPUs: try all that was never run on one; writes gpu_check.md
	$(BIN)/python -m benchmarks.gpu_check

# Debian's packages, unpacked and not installed, so that it takes no root; and what starts the browser among its libraries.
$(UNPACKED)/chromium:
	mkdir -p $(UNPACKED)/debs
	packages=$$(apt-get -s install --no-install-recommends $(BROWSER) | sed -n 's/^Inst \([^ ]*\).*/\1/p') && \
		cd $(UNPACKED)/debs && apt-get -q download $$packages
	for deb in $(UNPACKED)/debs/*.deb; do dpkg -x $$deb $(UNPACKED); done
	libraries=$$(find $(CURDIR)/$(UNPACKED)/usr/lib -name '*.so*' -printf '%h:' | tr : '\n' | sort -u | paste -sd:) && \
		printf '#!/bin/sh\nLD_LIBRARY_PATH=%s exec %s "$$@"\n' "$$libraries" \
		$(CURDIR)/$(UNPACKED)/usr/lib/chromium/$(BROWSER) > $@.part
	chmod +x $@.part && mv $@.part $@

fuzz: $(INSTALLED) ## try random programs, on all cores; goes on where RESULTS ends: make fuzz PROGRAMS=10000 SEED=0
	$(BIN)/python -m tests.random_programs run --programs $(PROGRAMS) --seed $(SEED) --results $(RESULTS)

fuzz-table: $(INSTALLED) ## add RESULTS, made on COMMIT, to the parts that are kept, and write their table into docs/fuzzing.md
	$(BIN)/python -m tests.random_programs table $(RESULTS) tests/random_programs/parts.json docs/fuzzing.md $(COMMIT)

lint: types ## ruff and mypy
	$(BIN)/ruff check $(SOURCES)

types: $(INSTALLED)
	$(BIN)/mypy

clean: ## remove everything that make and the tools created
	rm -rf .venv .venv-* .pytest_cache .mypy_cache .ruff_cache build dist *.egg-info
	find $(SOURCES) -name __pycache__ -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml $(CONSTRAINTS) constraints-common.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q $(PIP_FLAGS) -c $(CONSTRAINTS) -e ".[test]"
	@touch $@
