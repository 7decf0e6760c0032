"""What of a run is at a URL, whole: a file for each global step in the directory ``uploaded`` of the run."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import attrs
import msgspec

from profdeck.base.json_files import JsonKind
from profdeck_traces.base.files import replace_file

_DIRECTORY = "uploaded"


@attrs.frozen(kw_only=True)
class UploadedFile:
    """A file that was compared with the one at the other end."""

    size_bytes: int
    modified_ns: int
    """Of the file here, in Unix nanoseconds: when it changes, it is sent again."""
    sha256: str


@attrs.frozen(kw_only=True)
class UploadedPart:
    """The files of a global step, or those of the run itself."""

    name: str
    """Of the directory of the step; ``run`` for the files of the run itself."""
    url: str
    """Where it is, without what is secret in it."""
    files: dict[str, UploadedFile]
    """By their paths below the run directory."""
    whole: bool
    """Whether all of the step had ended and is there."""
    uploaded_ns: int = attrs.field(factory=time.time_ns)
    """When that was found, in Unix nanoseconds."""


_PART = JsonKind(UploadedPart)


def read_uploaded(run: Path) -> dict[str, UploadedPart]:
    """Return what is at a URL by its name, as far as its files can be read."""
    found = {}
    for file in (run / _DIRECTORY).glob("*.json"):
        with contextlib.suppress(OSError, ValueError):
            found[file.stem] = _PART.read(file)
    return found


def is_uploaded_somewhere(run: Path) -> bool:
    """Tell whether a run is one that is sent to a URL."""
    return (run / _DIRECTORY).is_dir()


def write_uploaded(run: Path, part: UploadedPart) -> None:
    """Record what is at a URL now.

    Raises:
        OSError: it cannot be written.
    """
    (run / _DIRECTORY).mkdir(exist_ok=True)
    content = msgspec.json.format(msgspec.json.encode(attrs.asdict(part)), indent=1)
    replace_file(run / _DIRECTORY / f"{part.name}.json", content, durable=True)
