# make install   the set-up alone: a virtual environment with the pinned development environment
# make demo      a server and three sites on this machine, training one model; DEMO_ARGS=... for `atoll demo`
# make test      all tests that need no GPU; TEST_ARGS=... for pytest
# make check     format, lint, types, import layers, protos, wheel
# make gpu-check the tests that need CUDA; VENV=... for an environment with a CUDA build of torch

PYTHON ?= python3
VENV ?= .venv
TEST_JOBS ?= 2

installed := $(VENV)/.atoll-installed

.PHONY: install demo test check gpu-check

install: $(installed)

# Modules are found through links into the checkout, so only these three files can make an installation old.
$(installed): pyproject.toml constraints.txt examples/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Atoll needs Python 3.11 or later; set PYTHON=")'
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]' --editable './examples[letters,trees]'
	@# What test_flwr.py compares with, in a folder of its own: flwr wants an older typer, which the part used here does not need.
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --no-deps --upgrade --target $(VENV)/flwr flwr iterators pycryptodome
	@touch $@

demo: install
	@$(VENV)/bin/atoll demo $(DEMO_ARGS)

test: install
	@$(VENV)/bin/pytest --quiet --numprocesses $(TEST_JOBS) --dist loadfile $(TEST_ARGS)

check: install
	@VENV=$(VENV) scripts/check

gpu-check:
	@scripts/gpu-check $(VENV)/bin/python $(TEST_ARGS)
