# Two commands do everything: `make demo` and `make test`. Both set up .venv first, once.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
export OMP_NUM_THREADS := 1

.PHONY: demo test lint bench clean

demo: $(READY)
	$(BIN)/python -m examples.demo

test: lint
	$(BIN)/pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python -m benchmarks.overhead

# Reinstalled only when what it installs changes.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(READY)

clean:
	rm -rf .venv build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
