PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check bench docs clean

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

# The site of docs/, into site/; a warning fails it. The variable is Material's own way to leave out its notice on its future.
docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

INSTALL = $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.venv/examples: pyproject.toml constraints.txt
	test -d .venv || $(PYTHON) -m venv .venv
	$(INSTALL) -e ".[examples]"
	touch $@

# Only what the extra itself names: the site is made from the source of the package, which need not be installed, nor torch.
.venv/docs: pyproject.toml constraints.txt
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])' \
		| tr " " "\n" | $(INSTALL) -r /dev/stdin
	touch $@

.venv/installed: pyproject.toml constraints.txt
	test -d .venv || $(PYTHON) -m venv .venv
	$(INSTALL) -e ".[check,cli,docs,examples,notebook,plot,ray,sweeps,test]"
	touch $@

clean:
	rm -rf .venv site
