"""A stand-in for torch, which the stand-in for torch_npu beside it needs for being imported."""
