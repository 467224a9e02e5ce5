# All commands of the project. Each installs what it needs and this machine lacks (scripts/install-missing).
# ARGS are passed on: `make test ARGS="-k first_slice -x"`.
PYTHON := .venv/bin/python
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-node lint format bench chaos fuzz deb rpm clean

help:
	@echo 'make demo    the whole story on this machine: a VM dies, its layers go (root; changes nothing)'
	@echo 'make test    the node test, then unit and system tests (root)'
	@echo 'make lint    ruff and mypy --strict'
	@echo 'make format  let ruff format the tree'
	@echo 'make bench   what it costs and how fast it is, beside the floor (root)'
	@echo 'make chaos   VMs, hostd and the bus killed at random moments     make fuzz   a longer look for bad input, and for bad orders'
	@echo 'make deb     the Debian package        make rpm    the RPM'
	@echo 'make test-node    a booted Debian node with hostd installed from its package (root)'
	@echo 'make clean   remove caches and build results (.venv stays)'

demo:
	@scripts/install-missing demo
	@$(PYTHON) -m tests.demo $(ARGS)

# The node test boots a virtual machine. It comes first, so that pytest's line on the unit and system tests is the last; with
# ARGS, which choose among those, it is left out.
test: $(if $(ARGS),,test-node)
	@scripts/install-missing test
	$(PYTHON) -m pytest $(ARGS)

lint:
	@scripts/install-missing lint
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

format:
	@scripts/install-missing lint
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

bench:
	@scripts/install-missing test
	@$(PYTHON) -m tests.bench $(ARGS)

test-node:
	tests/node/run $(NODE_ARGS)

deb:
	packaging/build-deb --lint $(ARGS)

rpm:
	packaging/build-rpm --check $(ARGS)

chaos:
	@scripts/install-missing test
	@$(PYTHON) -m tests.chaos $(ARGS)

fuzz:
	@scripts/install-missing test
	HOSTD_MODEL_EXAMPLES=5000 $(PYTHON) -m pytest tests/unit -m hypothesis --hypothesis-profile=fuzz $(ARGS)

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
