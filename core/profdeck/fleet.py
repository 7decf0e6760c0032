"""Reports the replacement of a class that earlier versions had here."""

raise ImportError("profdeck.fleet.Fleet was replaced by profdeck.Profiler.from_config(..., role=None, targets={...}).")
