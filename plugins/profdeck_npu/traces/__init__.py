"""Readers for the directory that torch_npu writes for one rank."""
