"""First seed of tests with random input. The nox sessions `fuzz` and `chaos` set a random seed."""

from __future__ import annotations

import os

FIRST_SEED = int(os.environ.get("PROFDECK_TEST_SEED", "0"))
