# Everything a newcomer types. `make up ARGS=-v` and `make test ARGS=-x` pass arguments on.
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin

.PHONY: up start stop status test test-all lint demo docs requirements bench-peers help

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 16

up: .venv/ready  ## start everything and follow the logs; Ctrl-C stops it
	@$(BIN)/python manage.py up $(ARGS)

start: .venv/ready  ## start everything in the background
	@$(BIN)/python manage.py up -d $(ARGS)

stop: .venv/ready  ## stop everything
	@$(BIN)/python manage.py down $(ARGS)

status: .venv/ready  ## what runs where
	@$(BIN)/python manage.py ps $(ARGS)

test: .venv/ready-dev  ## every test but the long ones, against real servers
	@$(BIN)/python -m pytest $(ARGS)

test-all: .venv/ready-dev  ## every test
	@$(BIN)/python -m pytest -m "" $(ARGS)

lint: .venv/ready-dev  ## ruff, its formatter, mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy .

demo: .venv/ready  ## half a minute: a worker is killed, the broker forgets everything, every effect is there once
	@$(BIN)/python manage.py demo $(ARGS)

docs: .venv/ready  ## make docs/configuration.md anew
	@$(BIN)/python manage.py config --markdown > docs/configuration.md

requirements:  ## pin requirements*.in anew (needs uv)
	uv pip compile --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
		--quiet requirements.in -o requirements.txt
	uv pip compile --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
		--quiet requirements-dev.in -o requirements-dev.txt
	uv pip compile --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
		--quiet requirements-bench.in -o requirements-bench.txt

bench-peers: .venv-bench/ready  ## install what `manage.py bench ingest` is measured beside, in a venv of its own

.venv/ready: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Celeriac needs Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@echo "Preparing .venv (once) …"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.txt
	@touch $@

.venv/ready-dev: .venv/ready requirements-dev.txt
	@echo "Preparing the tests' packages (once) …"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-dev.txt
	@touch $@

.venv-bench/ready: requirements-bench.txt
	@echo "Preparing .venv-bench (once) …"
	@$(PYTHON) -m venv .venv-bench
	@.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes \
		-r requirements-bench.txt
	@touch $@
