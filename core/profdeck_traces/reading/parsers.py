"""Selects the compiled parser or the Python parser."""

from __future__ import annotations

from profdeck_traces.reading import compiled
from profdeck_traces.reading.walking import Parser


def new_parser(args: dict[str, int], *, in_files: bool = False, in_python: bool = False) -> Parser:
    """Return the compiled parser, or the Python parser if the library cannot be used.

    Args:
        args: The args to read and their kinds, in the form of `profdeck_traces.reading.events.ARGS`.
        in_files: Keep columns in temporary files.
        in_python: Use the Python parser.
    """
    library = None if in_python else compiled.load_library()
    if library is not None:
        return compiled.CompiledParser(library, args, in_files=in_files)
    from profdeck_traces.reading.fallback import PythonParser  # rarely used, and takes 13 ms to import

    return PythonParser(args)
