PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check bench clean

# The main job: handwritten digits on two ranks, fit and test, one process group for each stage.
demo: .venv/examples
	$(BIN)/python examples/digits.py --destroy on_teardown

test: .venv/installed
	$(BIN)/python -m pytest -n 3 --dist worksteal

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/installed
	$(BIN)/python benchmarks/stage.py

INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.venv/examples: pyproject.toml constraints.txt
	test -d .venv || $(PYTHON) -m venv .venv
	$(INSTALL) -e ".[examples]"
	touch $@

.venv/installed: pyproject.toml constraints.txt
	test -d .venv || $(PYTHON) -m venv .venv
	$(INSTALL) -e ".[check,cli,docs,examples,notebook,plot,ray,sweeps,test]"
	touch $@

clean:
	rm -rf .venv
