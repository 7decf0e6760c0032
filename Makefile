# All targets create their environments automatically. They need Python 3.11 or newer.
PYTHON ?= python3
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/profdeck
NOX := $(CACHE)/nox-$(firstword $(shell cksum requirements/nox.txt))/bin/nox
# Runs nox and prints a summary of the sessions.
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

# Runs nox with any arguments, for example: make nox ARGS="-s unit -- -k schedule"
nox: $(NOX)
	@$(NOX) $(ARGS)

# Uses the torch of PYTHON. GPU contains arguments of the runner, for example: GPU="--budget 400 training"
gpu: $(NOX)
	@$(NOX) --session gpu -- --python $(PYTHON) $(GPU)

# The directory name contains the checksum of the pins. With the pins as a prerequisite, each new clone would rebuild it.
$(NOX):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "profdeck needs Python 3.11 or newer. Select one: make PYTHON=python3.11 $(MAKECMDGOALS)")'
	@rm -rf $(dir $(@D)) && $(PYTHON) -m venv $(dir $(@D))
	@$(@D)/python -m pip install --quiet --disable-pip-version-check -r requirements/nox.txt
	@touch $@
