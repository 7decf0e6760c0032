"""Small JSON files that anybody may have written."""

from __future__ import annotations

import subprocess
import sys

import pytest

from profdeck.base.json_files import decode_json

# Each round decodes a class that is new, and so are those of its members.
_IN_THREADS = """\
from __future__ import annotations
import sys, threading, types
from profdeck.base.json_files import decode_json

source = '''
from __future__ import annotations
import attrs

@attrs.frozen
class Inner:
''' + "".join(f"    member_{number}: int = 0\\n" for number in range(30)) + '''
@attrs.frozen
class Outer:
    one: Inner
    many: list[Inner]
    named: dict[str, Inner]
'''
sys.setswitchinterval(1e-6)
for number in range(30):
    module = sys.modules[name] = types.ModuleType(name := f"kinds_{number}")
    exec(source, vars(module))
    together = threading.Barrier(6)
    found = []

    def decode():
        together.wait()
        decoded = decode_json(b'{"one": {"member_1": 2}, "many": [{"member_1": 1}], "named": {"a": {}}}', module.Outer)
        found.append((decoded.one.member_1, decoded.many[0].member_1, decoded.named["a"].member_1))

    threads = [threading.Thread(target=decode) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(2, 1, 0)] * 6
"""


def test_threads_may_decode_a_class_for_the_first_time_at_once() -> None:
    subprocess.run([sys.executable, "-c", _IN_THREADS], check=True, timeout=60)


@pytest.mark.parametrize("text", [b"", b"[" * 10_000, b'{"a": 1', b"\xff", b"1e999"])
def test_what_is_no_document_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # the words are msgspec's
        decode_json(text, dict[str, int])
