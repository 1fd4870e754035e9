# Two commands do everything: `make demo` and `make test`. Both set up .venv first, once. `make test-all` tests the rest.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)
TORCH_VERSION := $(BIN)/python -c "from importlib.metadata import version; print(version('torch'))"
export OMP_NUM_THREADS := 1

# The native kernels, which `pip install -e .` builds in place.
KERNELS := $(wildcard src/thinwire/kernels/*.c src/thinwire/kernels/*.h)

.PHONY: demo test test-all docs dist lint bench soak soak-live sanitize compat constraints system clean

demo: $(READY)
	$(BIN)/thinwire bench --or-loopback --fresh --out demo.json \
	    --programs "BF16,Int8,Int4,Int2,PowerSGD(rank=4,factor_dtype='bf16'),DiLoCo(period=16,program=Int4())"
	$(BIN)/thinwire report demo.json

# Twice as many workers as cores: a rank test waits for its ranks, for timeouts and for processes that start.
WORKERS ?= $(shell echo $$((2 * $$(getconf _NPROCESSORS_ONLN))))
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist worksteal

# The shadow device is compiled meanwhile, on a clean checkout: tests that need it wait for it, the others do not.
test: lint system
	$(BIN)/python -m tests.shadow.device & \
	    $(PYTEST) -m "not slow" --ignore tests/integrations --ignore src/thinwire/integrations

# After `make test`, the tests that are marked as slow and those in the frameworks (Accelerate, HF Trainer, Lightning,
# Fabric, Ray, torchft), which are an extra of 600 MB. `make test test-all` runs no test twice.
test-all: test .venv/.integrations
	$(PYTEST) -m slow

.venv/.integrations: $(READY)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev,integrations,torchft]' -e ./repopages
	@[ "$$($(TORCH_VERSION))" = "$$(cat $(READY))" ] || { echo "the frameworks replaced torch $$(cat $(READY)) by" \
	    "$$($(TORCH_VERSION)): pin versions in constraints.txt that accept the former, then run make clean" >&2; exit 1; }
	touch $@

# The documentation as a site, without a warning, by the tool in repopages/: site/index.html. It works offline.
docs: $(READY)
	$(BIN)/repopages build . --out site --strict

# What would be released: built, checked, installed in an empty environment, and run there.
dist: $(READY)
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv --clear build/empty
	build/empty/bin/pip install --quiet -c constraints.txt "$$(ls $(CURDIR)/dist/*.whl)[report]"
	cd build && OMP_NUM_THREADS=1 empty/bin/python $(CURDIR)/examples/check.py

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
	$(BIN)/pytest -q tests/faults/test_elastic.py
	$(BIN)/python -m tests.faults.soak --seed $(SEED) --episodes $(EPISODES) --minutes $(MINUTES)

# Replicas of one torchft job that are killed, frozen or cut off, and come back; the last line has the count.
LIVE_EPISODES ?= 50
soak-live: .venv/.integrations
	$(BIN)/python benchmarks/live_soak.py --seed $(SEED) --episodes $(LIVE_EPISODES) --minutes $(MINUTES)

# Every kernel under AddressSanitizer and UndefinedBehaviorSanitizer, for the baseline and, on x86-64, for AVX2.
CC ?= cc
SANITIZE := $(CC) -std=c11 -O2 -g -Wall -Wextra -Werror -Wno-psabi -ffp-contract=off -fno-math-errno -fno-trapping-math \
    -fsanitize=address,undefined -fno-sanitize-recover=all -DPLAIN -Isrc/thinwire/kernels
sanitize: tests/kernels/sanitize.c $(KERNELS)
	@mkdir -p build
	for arch in baseline $(if $(filter x86_64,$(shell uname -m)),x86-64-v3); do \
	    $(SANITIZE) $$([ $$arch = baseline ] || echo -march=$$arch) $(filter %.c,$^) -o build/sanitize-$$arch -lm \
	        && echo $$arch && build/sanitize-$$arch || exit 1; \
	done

# The suite on another torch: `make compat TORCH=2.15.0`. Its builds bring CUDA, several GB: not part of `make test`.
# `TESTS="tests/programs tests/surface"` runs a part of it.
TORCH ?= 2.15.0
TESTS ?=
COMPAT := .venv-torch-$(TORCH)
compat: system
	$(PYTHON) -m venv $(COMPAT)
	sed -e 's/^torch==.*/torch==$(TORCH)/' -e '/^numpy==/d' constraints.in > $(COMPAT)/constraints.txt
	$(COMPAT)/bin/pip install --quiet --no-cache-dir -c $(COMPAT)/constraints.txt -e '.[dev]' -e ./repopages
	$(COMPAT)/bin/python -c "import torch; print('torch', torch.__version__)"
	PYTHONPATH=$(CURDIR)/src:$(CURDIR):$(CURDIR)/repopages/src $(COMPAT)/bin/pytest -n $(WORKERS) --dist worksteal $(TESTS)

# Every package that the extras install, with its version, for all supported Pythons: constraints.txt from constraints.in.
# No hashes: a build of torch for CPU has others than the one on PyPI.
constraints: build/uv
	$</bin/uv pip compile pyproject.toml repopages/pyproject.toml --all-extras --universal --python-version 3.10 --upgrade -c constraints.in \
	    --no-annotate --custom-compile-command "make constraints" --quiet -o constraints.txt

build/uv:
	$(PYTHON) -m venv $@
	$@/bin/pip install --quiet uv

# What the tests need beyond Python: network tools for the lab, a browser for the report.
system:
	@{ command -v chromium || command -v google-chrome; } >/dev/null && PATH=$$PATH:/usr/sbin command -v tc >/dev/null || \
	    { $(SUDO) apt-get update -qq && \
	      $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium iproute2 >/dev/null; }

# Reinstalled only when what it installs changes. The .pth lets benchmarks/ and examples/ run by their path.
$(READY): pyproject.toml repopages/pyproject.toml constraints.txt Makefile $(KERNELS)
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]' -e ./repopages
	$(BIN)/python -c "import pathlib, site; pathlib.Path(site.getsitepackages()[0], 'checkout.pth').write_text('$(CURDIR)')"
	$(TORCH_VERSION) > $(READY)

clean:
	rm -rf .venv .venv-torch-* build dist site src/thinwire/kernels/*.so demo.json demo.html .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
