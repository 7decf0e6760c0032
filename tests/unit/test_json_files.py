"""Small JSON files that anybody may have written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from profdeck.base.json_files import JSON_OBJECT

# Every second process died when the threads were the first to decode the class.
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


def test_threads_may_read_the_first_manifests_at_once(tmp_path: Path) -> None:
    (file := tmp_path / "manifest.json").write_text("{}")
    for _ in range(3):
        subprocess.run([sys.executable, "-c", _MANIFEST_IN_THREADS, file], check=True, timeout=60)


@pytest.mark.parametrize("text", [b"", b"[" * 10_000, b'{"a": 1', b"\xff", b"1e999", b"[1]"])
def test_what_is_no_document_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # the words are msgspec's
        JSON_OBJECT.decode(text)
