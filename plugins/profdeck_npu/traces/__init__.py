"""What torch_npu writes for one rank: a directory of timelines, tables and raw data."""
