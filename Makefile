# Two commands do everything: `make demo` and `make test`. Both set up .venv first, once.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)
export OMP_NUM_THREADS := 1

.PHONY: demo test lint bench soak system clean

demo: $(READY)
	$(BIN)/thinwire bench --or-loopback --fresh --out demo.json \
	    --programs "BF16,Int8,Int4,PowerSGD(rank=4,factor_dtype='bf16')"
	$(BIN)/thinwire report demo.json

test: lint system
	$(BIN)/pytest -n 2 --dist loadfile

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python benchmarks/overhead.py

# Random faults on real ranks; `make soak SEED=1017 EPISODES=1` repeats one.
SEED ?= 1000
EPISODES ?= 320
MINUTES ?= 20
soak: $(READY)
	THINWIRE_SOAK=1 $(BIN)/pytest -q tests/ranks/test_elastic.py
	$(BIN)/python -m tests.soak --seed $(SEED) --episodes $(EPISODES) --minutes $(MINUTES)

# What the tests need beyond Python: network tools for the lab, a browser for the report.
system:
	@command -v chromium >/dev/null && PATH=$$PATH:/usr/sbin command -v tc >/dev/null || \
	    { $(SUDO) apt-get update -qq && \
	      $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium iproute2 >/dev/null; }

# Reinstalled only when what it installs changes. The .pth lets benchmarks/ and examples/ run by their path.
$(READY): pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python -c "import pathlib, site; pathlib.Path(site.getsitepackages()[0], 'checkout.pth').write_text('$(CURDIR)')"
	touch $(READY)

clean:
	rm -rf .venv build demo.json demo.html .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
