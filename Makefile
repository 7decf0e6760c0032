# `make demo` and `make test` do all set-up. They need Python 3.11 or later.
PYTHON ?= python3
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/profdeck
NOX := $(CACHE)/nox-$(firstword $(shell cksum requirements/nox.txt))/bin/nox
# Runs nox, then prints a table of the sessions.
RUN_SESSIONS = $(dir $(NOX))python tests/run_sessions.py

.PHONY: demo test test-engines lint bench gpu nox
demo: $(NOX)
	@$(NOX) --session demo

test: $(NOX)
	@$(RUN_SESSIONS)

test-engines: $(NOX)
	@$(RUN_SESSIONS) --tags engines

lint: $(NOX)
	@$(NOX) --session lint

bench: $(NOX)
	@$(NOX) --session bench

# Any session, such as `make nox ARGS="-s unit -- -k schedule"`.
nox: $(NOX)
	@$(NOX) $(ARGS)

# Over the torch of PYTHON; arguments of the runner in GPU, such as GPU="--budget 400 training".
gpu: $(NOX)
	@$(NOX) --session gpu -- --python $(PYTHON) $(GPU)

# The directory name has the checksum of the pins. A file as prerequisite would rebuild it for each new clone.
$(NOX):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "profdeck needs Python 3.11 or later; name one: make PYTHON=python3.11 $(MAKECMDGOALS)")'
	@rm -rf $(dir $(@D)) && $(PYTHON) -m venv $(dir $(@D))
	@$(@D)/python -m pip install --quiet --disable-pip-version-check -r requirements/nox.txt
	@touch $@
