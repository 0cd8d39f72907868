# `make help` lists the targets.
#
# They run in a virtual environment that is made on first use. Where torch is installed already (a machine with GPUs,
# a container), say `make VENV= PYTHON=python3 …`: that interpreter is used as it is and nothing gets installed.

PYTHON ?= python3
VENV   ?= .venv

ifeq ($(strip $(VENV)),)
PY    := $(PYTHON)
READY :=
# Not installed, so it has to be found.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY    := $(VENV)/bin/python
READY := $(VENV)/.installed

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -c constraints.txt -e '.[dev,bench]'
	touch $@
endif

.DEFAULT_GOAL := help
.PHONY: help demo test test-gpu lint bench clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*##/\1\t/p' Makefile | expand -t 12

demo: $(READY)  ## a tensor-parallel MLP, on GPUs if there are any, else on processes of this machine
	$(PY) examples/tp_mlp.py

# Many tests leave a core idle, while those of tests/test_aot.py do nothing but compile. So these run beside the suite
# from its start, unheard: they fill Triton's cache, and the suite, which comes to them late, finds everything compiled.
# They have a directory for temporary files that goes with them, as whoever is killed does not clean up.
test: $(READY)  ## the test suite; ranks are processes, on GPUs where a test finds enough of them
	@beside=$$(mktemp -d); \
	TMPDIR=$$beside $(PY) -m pytest -q -p no:cacheprovider tests/test_aot.py >$$beside/log 2>&1 & compiler=$$!; \
	trap 'trap "" INT TERM HUP; kill $$compiler 2>/dev/null; wait $$compiler 2>/dev/null; rm -rf $$beside' EXIT; \
	trap 'exit 130' INT; trap 'exit 143' TERM HUP; \
	echo '$(PY) -m pytest -q'; $(PY) -m pytest -q

REPEAT ?= 1
test-gpu: $(READY)  ## the test suite on GPUs only, each test REPEAT times; one that needs more of them is skipped
	TDKERNELS_TEST_DEVICE=cuda $(PY) -m pytest -q --repeat $(REPEAT)

# No `ruff format`: kernels keep their columns aligned by hand.
lint: $(READY)  ## ruff
	$(PY) -m ruff check .

bench: $(READY)  ## the benchmarks
	$(PY) -m tdkernels bench

clean:  ## remove what the other targets made, the environment in .venv included
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
