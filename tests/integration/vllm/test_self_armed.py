"""Tests of captures that a config arms in vLLM's workers."""

from __future__ import annotations

from typing import ClassVar

from engine_contract import SelfArmedContract


class TestSelfArmed(SelfArmedContract):
    backend = "vllm"
    environment: ClassVar[dict[str, str]] = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
