"""Executes docs/how-to/vllm.md, against a server started as the page says and with engines of the tiny model."""

from __future__ import annotations

from typing import ClassVar

from engine_contract import PageContract
from pages import ROOT


class TestPage(PageContract):
    page = ROOT / "docs" / "how-to" / "vllm.md"
    url = "http://127.0.0.1:8000"
    skipped = "needs a vLLM server"
    plugins: ClassVar[dict[str, str]] = {"VLLM_PLUGINS": "profdeck"}
    tiny = 'load_format="dummy", enforce_eager=True, max_model_len=256, dtype="float32"'
    runs: ClassVar[dict[str, set[str]]] = {"first": {"server"}, "shapes": {"server"}, "merged": {"server"}}
