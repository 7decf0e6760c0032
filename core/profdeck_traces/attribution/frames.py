"""Classifies Python frames by the names that torch records.

The name of a frame is ``file(line): function``, where the line is the first line of the function. torch strips the
matching ``sys.path`` entry from the file path, so the origin of packages on ``sys.path`` is not visible.
"""

from __future__ import annotations

import re
import sys

from profdeck_traces.reading.event_names import is_profiler_frame

_MODULE = re.compile(r"nn\.Module: (?P<class_name>.+?)(?:_\d+)?")
_FRAME = re.compile(r"(?P<file>.+)\((?P<line>\d+)\): (?P<function>.*)", re.DOTALL)
_LIBRARY = re.compile(
    r"(?:torch|torch_npu|torchgen|torchvision|functorch|triton|numpy|pluggy|safetensors)[\\/]"
    r"|(?:.*[\\/])?(?:(?:site|dist)-packages|lib[\\/]python3[^\\/]*)[\\/]"
    r"|.*[\\/]torchinductor_"
)
_COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>"})
_TYPED_IN = re.compile(r"<stdin>|<ipython-input.*")


def module_class(name: str) -> str | None:
    """Return the class name from an ``nn.Module`` frame, or None for other frames."""
    module = _MODULE.fullmatch(name)
    return None if module is None else module["class_name"]


def parse_frame(name: str) -> tuple[str, int, str] | None:
    """Return the file, first line and function of a frame, or None if its name is not ``file(line): function``."""
    frame = _FRAME.fullmatch(name)
    return None if frame is None else (frame["file"], int(frame["line"]), frame["function"])


def is_user_frame(name: str) -> bool:
    """Return whether a frame belongs to user code: not to torch, the standard library, site-packages or profdeck.

    Comprehensions are part of the function that contains them, as in Python 3.12 (PEP 709).
    """
    frame = _FRAME.fullmatch(name)
    if frame is None or frame["function"] in _COMPREHENSIONS:
        return False
    file = frame["file"]
    if file.startswith("<"):
        return _TYPED_IN.fullmatch(file) is not None or (file, frame["function"]) == ("<string>", "<module>")
    first, *others = re.split(r"[\\/]", file)
    package = first if others else first.removesuffix(".py")
    is_standard = package in sys.stdlib_module_names and package != "test"
    return not is_standard and _LIBRARY.match(file) is None and not is_profiler_frame(name)
