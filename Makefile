# Two commands do everything: `make demo` and `make test`. Both set up .venv first, once.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
export OMP_NUM_THREADS := 1

.PHONY: demo test lint bench clean

demo: $(READY)
	$(BIN)/python examples/demo.py

test: lint
	$(BIN)/pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python benchmarks/overhead.py

# Reinstalled only when what it installs changes. The .pth lets benchmarks/ and examples/ run by their path.
$(READY): pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python -c "import pathlib, site; pathlib.Path(site.getsitepackages()[0], 'checkout.pth').write_text('$(CURDIR)')"
	touch $(READY)

clean:
	rm -rf .venv build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
