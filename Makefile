# `make help` lists the targets.
#
# Targets run in a virtual environment, which the first one creates. If torch is already installed (a machine with GPUs,
# a container), use `make VENV= PYTHON=python3 …`: it runs this interpreter and installs nothing.

PYTHON ?= python3
VENV   ?= .venv

ifeq ($(strip $(VENV)),)
PY     := $(PYTHON)
READY  :=
OLDEST :=
# Without a virtual environment the package is not installed, so it must be on the path.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY     := $(VENV)/bin/python
READY  := $(VENV)/.installed
# tests/compiled/test_oldest_triton.py is skipped if this file does not exist.
OLDEST := $(VENV)/oldest-triton/.installed

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -c constraints.txt -e '.[dev,bench,docs]'
	touch $@

# The oldest supported triton, for test_oldest_triton.py alone: Python does not import packages from this folder unless it
# is in PYTHONPATH. It takes about 650 MB.
$(OLDEST): pyproject.toml | $(READY)
	rm -rf $(@D)
	$(PY) -m pip install -q --no-deps --no-compile --target $(@D) \
		"triton==$$(sed -n 's/.*"triton>=\([0-9.]*\)".*/\1/p' pyproject.toml)"
	touch $@
endif

.DEFAULT_GOAL := help
.PHONY: help demo test test-oldest test-oldest-torch test-newest test-integrations test-gpu test-one-gpu fuzz chaos \
	lint docs docs-serve bench clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*##/\1\t/p' Makefile | expand -t 12

demo: $(READY)  ## a tensor-parallel MLP, on GPUs if there are any, else on processes of this machine
	$(PY) examples/tp_mlp.py

# Tests start many programs that import the package, which takes longer without files of bytecode.
unexport PYTHONDONTWRITEBYTECODE

# Two processes run the suite concurrently, because many tests leave a core idle and others only compile. They divide the
# modules while they run (tests/support/sharing.py). The second one has its own directory for temporary files, which is
# removed even if the process is killed. The tests in ALONE run first: they check files that processes leave behind, or
# measure time. CI=true: each part must run tests on several ranks.
ALONE := tests/symm/test_buffer.py tests/test_import.py::test_import_is_quiet_and_quick
test: $(READY) $(OLDEST)  ## the test suite; ranks are processes, on GPUs where a test finds enough of them
	CI=true $(PY) -m pytest -q $(ALONE)
	@beside=$$(mktemp -d); export TDKERNELS_TEST_CLAIMS=$$beside/claims; mkdir $$TDKERNELS_TEST_CLAIMS; \
	CI=true TMPDIR=$$beside TDKERNELS_TEST_REVERSED=1 $(PY) -m pytest -q -p no:cacheprovider tests $(ALONE:%=--deselect=%) \
		>$$beside/log 2>&1 & other=$$!; \
	trap 'trap "" INT TERM HUP; kill $$other 2>/dev/null; wait $$other 2>/dev/null; rm -rf $$beside' EXIT; \
	trap 'exit 130' INT; trap 'exit 143' TERM HUP; \
	echo '$(PY) -m pytest -q'; CI=true $(PY) -m pytest -q tests $(ALONE:%=--deselect=%); first=$$?; \
	wait $$other; second=$$?; echo '$(PY) -m pytest -q, the other modules'; cat $$beside/log; \
	[ $$first = 0 ] && [ $$second = 0 ]

test-oldest: $(READY) $(OLDEST)  ## compile the Gluon kernels with the oldest supported triton, as `make test` does too
	$(PY) -m pytest -q -rs tests/compiled/test_oldest_triton.py

# A separate environment, upgraded on each run. It needs about 6 GB, because the newest torch is a CUDA build.
NEWEST ?= .venv-newest
test-newest:  ## the test suite with the newest versions that pip finds, instead of those in constraints.txt
	[ -x $(NEWEST)/bin/python ] || $(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --upgrade --upgrade-strategy eager -e '.[dev,bench]'
	$(NEWEST)/bin/python -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__)'
	$(MAKE) test VENV= PYTHON=$(NEWEST)/bin/python

OLDEST_TORCH ?= .venv-oldest
test-oldest-torch:  ## the test suite with the oldest supported torch, and the triton that it was built for
	[ -x $(OLDEST_TORCH)/bin/python ] || $(PYTHON) -m venv $(OLDEST_TORCH)
	$(OLDEST_TORCH)/bin/python -m pip install -e '.[dev,bench]' \
		"torch==$$(sed -n 's/.*"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml)" \
		"triton==$$(sed -n 's/.*"triton>=\([0-9.]*\)".*/\1/p' pyproject.toml)"
	$(MAKE) test VENV= PYTHON=$(OLDEST_TORCH)/bin/python

test-integrations: $(READY)  ## the tests with transformers, torchtitan and megatron-core, which it installs
	$(PY) -m pip install -q -c constraints.txt -e '.[dev,integrations]'
	$(PY) -m pytest -q tests/integrations tests/nn/test_transformers.py

REPEAT ?= 1
test-gpu: $(READY)  ## the test suite on GPUs only, each test REPEAT times; one that needs more of them is skipped
	TDKERNELS_TEST_DEVICE=cuda $(PY) -m pytest -q --repeat $(REPEAT)

TESTS ?= tests/ops tests/lang tests/runtime tests/symm tests/test_protocol.py
test-one-gpu: $(READY)  ## TESTS on ranks that share the GPUs there are, however few, each REPEAT times; it takes long
	TDKERNELS_TEST_DEVICE=shared $(PY) -m pytest -q --repeat $(REPEAT) $(TESTS)

SEEDS ?= 10
OPS ?=
fuzz: $(READY)  ## SEEDS schedules of every variant of the operators OPS (all if empty), values compared
	$(PY) -m tests.fuzz --seeds $(SEEDS) --ops "$(OPS)"

# CASES=1 prints the events on each rank for one SEED. SECONDS bounds the time instead of the number of cases.
# DEVICE=shared: ranks share the GPUs; DEVICE=cuda: each rank has its own GPU. RANKS: the world sizes. OPS: operators, all
# if empty. OUT: folder for the summary. CHAOS: further options, see `python -m tests.chaos --help`.
SEED   ?= 0
DEVICE ?= cpu
RANKS  ?= 2,3
chaos: $(READY)  ## faults in CASES calls of the operators OPS, or for SECONDS, on RANKS ranks; DEVICE=cpu, shared or cuda
	$(PY) -m tests.chaos --device $(DEVICE) --ranks $(RANKS) --seed $(SEED) $(if $(CASES),--cases $(CASES)) \
		$(if $(SECONDS),--seconds $(SECONDS)) $(if $(OPS),--ops "$(OPS)") $(if $(OUT),--out $(OUT)) $(CHAOS)

# No `ruff format`: kernels are aligned by hand.
lint: $(READY)  ## ruff, and mypy over the package
	$(PY) -m ruff check .
	$(PY) -m mypy

docs: $(READY)  ## build the documentation site into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

docs-serve: $(READY)  ## serve the documentation site, and rebuild it when a file changes
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs serve

bench: $(READY)  ## the benchmarks
	$(PY) -m tdkernels bench

clean:  ## remove what the other targets made, the environments included
	rm -rf .venv .venv-newest .venv-oldest build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
