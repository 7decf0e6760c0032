"""Stub of torch_npu that supports only the offline analysis. STUB_ANALYSIS selects its behaviour."""

import os

if os.environ.get("STUB_ANALYSIS") == "no library":
    raise ImportError("libhccl.so: cannot open shared object file: No such file or directory")
