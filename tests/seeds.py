"""The first seed of tests with random input: 0, or a random number in the nox sessions `fuzz` and `chaos`."""

from __future__ import annotations

import os

FIRST_SEED = int(os.environ.get("PROFDECK_TEST_SEED", "0"))
