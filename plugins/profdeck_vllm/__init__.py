"""The vLLM backend. Imports nothing by itself: vLLM loads this package in every process of an engine."""
