# The commands of everyday work. ARGS passes arguments on: `make up ARGS=-v`, `make test ARGS=-x`.
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
# Three processes for two cores: many tests wait. Bytecode is kept even if the shell forbids it, because most of the
# programs that the tests start import everything; `__pycache__` is ignored by git.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist loadfile

.PHONY: up start stop status test test-all lint demo docs requirements bench-peers help

help:  ## print this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 16

up: .venv/ready  ## start everything and print the logs; Ctrl-C stops it
	@$(BIN)/python manage.py up $(ARGS)

start: .venv/ready  ## start everything in the background
	@$(BIN)/python manage.py up -d $(ARGS)

stop: .venv/ready  ## stop everything
	@$(BIN)/python manage.py down $(ARGS)

status: .venv/ready  ## list what is running, with addresses
	@$(BIN)/python manage.py ps $(ARGS)

test: .venv/ready-dev  ## run all tests but the long ones, against real servers
	@$(PYTEST) $(ARGS)

test-all: .venv/ready-dev  ## run all tests
	@$(PYTEST) -m "" $(ARGS)

lint: .venv/ready-dev  ## check style, formatting, types and the direction of imports
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy .
	@$(BIN)/lint-imports --no-logo --no-cache

demo: .venv/ready  ## kill a worker, empty the broker, and show that every effect happened once (30 s)
	@$(BIN)/python manage.py demo $(ARGS)

docs: .venv/ready  ## regenerate docs/configuration.md, docs/messages.md and docs/metrics.md
	@$(BIN)/python manage.py config --markdown > docs/configuration.md
	@$(BIN)/python manage.py config --messages > docs/messages.md
	@$(BIN)/python manage.py config --metrics > docs/metrics.md

requirements:  ## pin the packages of requirements*.in; keeps versions that still fit (needs uv)
	@for name in requirements requirements-dev requirements-bench; do \
		uv pip compile --universal --python-version 3.11 --generate-hashes --no-header --no-annotate --quiet \
			$$name.in -o $$name.txt || exit 1; \
	done

bench-peers: .venv-bench/ready  ## install the systems that `manage.py bench ingest` compares with, into .venv-bench

.venv/ready: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Celeriac needs Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@echo "Installing packages into .venv (once) …"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.txt
	@touch $@

.venv/ready-dev: .venv/ready requirements-dev.txt
	@echo "Installing the packages for tests (once) …"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-dev.txt
	@touch $@

.venv-bench/ready: requirements-bench.txt
	@echo "Installing packages into .venv-bench (once) …"
	@$(PYTHON) -m venv .venv-bench
	@.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check 'pip>=25'  # older ones refuse psycopg[pool]
	@.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes \
		-r requirements-bench.txt
	@touch $@
