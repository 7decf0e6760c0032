"""Stub of torch, so that the torch_npu stub in this directory can be imported."""
