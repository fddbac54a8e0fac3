PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-oldest check bench docs clean

# The main job: handwritten digits on two ranks, fit and test, one process group for each stage.
demo: .venv/examples
	$(BIN)/python examples/digits.py --destroy on_teardown

test: .venv/installed
	$(BIN)/python -m pytest -n 3 --dist worksteal

# The same with the oldest Lightning that pyproject.toml admits, in an environment of its own.
test-oldest: .venv-oldest/installed
	.venv-oldest/bin/python -m pytest -n 3 --dist worksteal

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# All benchmarks, in less than 20 minutes on two cores; the machine should have nothing else to do. QUICK=1 only tries them out.
bench: .venv/installed
	$(BIN)/python benchmarks/run.py $(if $(QUICK),--quick --into build/benchmarks,--readme README.md)

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

# pip takes one version of each: the lines of constraints-oldest.txt stand in for those of constraints.txt.
.venv-oldest/installed: pyproject.toml constraints.txt constraints-oldest.txt
	test -d .venv-oldest || $(PYTHON) -m venv .venv-oldest
	awk -F== 'FNR == NR { oldest[$$1] } FNR == NR || !($$1 in oldest)' constraints-oldest.txt constraints.txt \
		> .venv-oldest/constraints.txt
	.venv-oldest/bin/pip install --quiet --disable-pip-version-check -c .venv-oldest/constraints.txt \
		-e ".[cli,examples,notebook,plot,sweeps,test]"
	touch $@

clean:
	rm -rf .venv .venv-oldest site
