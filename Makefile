# Two commands: `make quickstart` and `make test`. Each makes its own virtual environment first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: quickstart test slow deployment faults realdata lint format clean

quickstart: $(VENV)/installed
	$(BIN)/gpfl quickstart

test: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

slow: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m 'slow and not gpu and not realdata and not deployment'

deployment: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -m deployment

faults: $(VENV)/installed-dev
	GPFL_FAULTS_TABLE=1 OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m faults tests/deploy

realdata: $(VENV)/installed-dev
	@test -n "$(GPFL_DATA)" || { echo "GPFL_DATA must name the folder of the published files"; exit 2; }
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 -m realdata

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gpfl needs Python 3.11 or newer; this is " + sys.version.split()[0] + ": make PYTHON=python3.11 …")'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/installed: $(VENV)/made pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/installed-dev: $(VENV)/made pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@ $(VENV)/installed

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
