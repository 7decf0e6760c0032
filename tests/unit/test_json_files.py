"""Tests of JSON files from untrusted sources."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from profdeck.base.json_files import JSON_OBJECT

# If these threads were the first to decode the class, about half of the processes crashed.
_MANIFEST_IN_THREADS = """\
import contextlib, sys, threading
from pathlib import Path
from profdeck.base.errors import ProfdeckError
from profdeck.records.manifest import read_manifest

def read():
    together.wait()
    with contextlib.suppress(ProfdeckError):
        read_manifest(Path(sys.argv[1]))

sys.setswitchinterval(1e-6)
together = threading.Barrier(6)
threads = [threading.Thread(target=read) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_first_manifests_can_be_read_concurrently(tmp_path: Path) -> None:
    (file := tmp_path / "manifest.json").write_text("{}")
    for _ in range(3):
        subprocess.run([sys.executable, "-c", _MANIFEST_IN_THREADS, file], check=True, timeout=60)


@pytest.mark.parametrize("text", [b"", b"[" * 10_000, b'{"a": 1', b"\xff", b"1e999", b"[1]"])
def test_invalid_json_raises_value_error(text: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # the message is msgspec's
        JSON_OBJECT.decode(text)
