"""Tests of the store for on-demand captures that uses torch's TCPStore."""

from __future__ import annotations

import threading

import pytest

from processes import free_port, until
from profdeck_torch.tcp_store import connect

pytestmark = pytest.mark.torch


def test_store_is_consistent_and_stops_its_threads(capfd: pytest.CaptureFixture[str]) -> None:
    torch_store = pytest.importorskip("torch.distributed").TCPStore
    server = torch_store("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = connect("run", f"127.0.0.1:{server.port}")
    assert (store.create("a.json", b"1"), store.create("a.json", b"2")) == (b"1", b"1")
    store.remove("a.json", b"2")
    assert store.read("a.json") == b"1"
    store.remove("a.json", b"1")
    assert (store.read("a.json"), store.create("a.json", b"3")) == (None, b"3")
    for name, content in (("processes/x.json", b"4"), ("processes/y.json", b"5"), ("processes/x.json", b"6")):
        store.put(name, content)
    assert dict(store.read_all("processes/")) == {"processes/x.json": b"6", "processes/y.json": b"5"}
    store.put("junk", b"\xff")
    store.remove("junk", b"\xff")
    assert store.read("junk") is None
    store.close()
    unreachable = connect("run", f"127.0.0.1:{free_port()}")
    for _ in range(5):
        with pytest.raises(ConnectionError, match="Cannot connect to tcpstore:127.0.0.1:"):
            unreachable.read("a.json")
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "profdeck store"])
    assert "frame #" not in capfd.readouterr().err
