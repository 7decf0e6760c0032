"""A stand-in for torch_npu: only its offline analysis, which does what STUB_ANALYSIS says; see its module."""

import os

if os.environ.get("STUB_ANALYSIS") == "no library":
    raise ImportError("libhccl.so: cannot open shared object file: No such file or directory")
