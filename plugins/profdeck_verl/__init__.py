"""verl integration for ``global_profiler.tool=profdeck``.

This module imports nothing, because verl loads it in all processes.
"""
