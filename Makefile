PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check bench clean

# The main job: handwritten digits on two ranks, fit and test, one process group for each stage.
demo: .venv/installed
	$(BIN)/python examples/digits.py --destroy on_teardown

test: .venv/installed
	$(BIN)/python -m pytest

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/installed
	$(BIN)/python benchmarks/stage.py

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[check,examples,ray,test]"
	touch $@

clean:
	rm -rf .venv
