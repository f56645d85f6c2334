# One file for everything a newcomer runs. CONSTRAINTS chooses the pinned versions:
#   make demo                                    CPU
#   make demo CONSTRAINTS=constraints/cuda.txt   CUDA
PYTHON ?= python3
CONSTRAINTS ?= constraints/cpu.txt
VENV ?= .venv
BIN = $(VENV)/bin
# One thread per process: two processes on two cores beat one process with two threads on models this small.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: install demo test check format clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml $(wildcard constraints/*.txt)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) torch
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[dev]'
	touch $@

demo: install
	$(BIN)/lit-refusion demo

test: install
	$(BIN)/python -m pytest -n 2 --dist worksteal

check: test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) runs
