"""profdeck in verl, by ``global_profiler.tool=profdeck``. Imports nothing: verl loads this package everywhere."""
