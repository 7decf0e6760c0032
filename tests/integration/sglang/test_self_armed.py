"""Tests of captures that a config arms in SGLang's schedulers."""

from __future__ import annotations

from pathlib import Path

from engine_contract import SelfArmedContract
from sglang_traces import spans


class TestSelfArmed(SelfArmedContract):
    backend = "sglang"

    @staticmethod
    def check_trace(path: Path) -> None:
        # Each of the job's generations is a prefill and five decodes.
        assert spans(path) == ["DECODE"] * 3
