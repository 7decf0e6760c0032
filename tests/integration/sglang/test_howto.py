"""Tests for the scripts in docs/how-to/sglang.md, run with a tiny model."""

from __future__ import annotations

from typing import ClassVar

from engine_contract import PageContract
from pages import ROOT


class TestPage(PageContract):
    page = ROOT / "docs" / "how-to" / "sglang.md"
    plugins: ClassVar[dict[str, str]] = {"SGLANG_PLUGINS": "profdeck"}
    tiny = (
        'load_format="dummy", device="cpu", dtype="float32", disable_cuda_graph=True, grammar_backend="none", '
        'attention_backend="torch_native", sampling_backend="pytorch", context_length=256, max_total_tokens=2048, '
        "max_running_requests=8, sleep_on_idle=True"
    )
