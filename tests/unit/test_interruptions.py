"""What a host's signal handler raises amid our work reaches the host, at whatever line it comes."""

from __future__ import annotations

import functools
import gc
import signal
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Any

import attrs
import pytest

from profdeck.base.structuring import structure, unstructure


class HostsTimeoutError(Exception):
    """What it raises."""


class Kind(StrEnum):
    """A choice."""

    ONE = "one"


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise HostsTimeoutError

    before = signal.signal(signal.SIGUSR1, ring)
    yield
    signal.signal(signal.SIGUSR1, before)


def interrupted(call: Callable[[], object], at: int) -> bool:
    """Call while a signal comes at the n-th line; False if the call has fewer lines.

    Raises:
        HostsTimeoutError: what the handler raised came out.
    """
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        lines += event == "line" and frame.f_code is not interrupted.__code__
        if lines == at:
            lines += 1
            signal.raise_signal(signal.SIGUSR1)
        return trace

    gc.disable()  # of what a callback of the collection raises Python says so, and goes on
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
        gc.enable()
    return lines > at


def value_of_a_new_class() -> Any:
    """Make what no converter has seen, as at the first capture of a process."""
    part = attrs.make_class("Part", {"kind": attrs.field(type=Kind), "path": attrs.field(type=Path)})
    whole = attrs.make_class("Whole", {"parts": attrs.field(type=tuple[part, ...]), "count": attrs.field(type=int)})
    return whole((part(Kind.ONE, Path("a")),), 3)


DATA = {"parts": [{"kind": "one", "path": "a"}], "count": 3}


def test_there_and_back() -> None:
    value = value_of_a_new_class()
    assert unstructure(value) == DATA
    assert structure(DATA, type(value), where="") == value


@pytest.mark.parametrize("way", ["there", "back"])
def test_no_line_swallows_it(way: str) -> None:
    known = type(value_of_a_new_class())
    structure(DATA, known, where="")
    at, more = 0, True
    while more:
        at += 1
        back = functools.partial(structure, DATA, known, where="")
        call = functools.partial(unstructure, value_of_a_new_class()) if way == "there" else back
        try:
            more = interrupted(call, at)
        except HostsTimeoutError:
            continue
        assert not more, f"line {at} swallowed it"
    assert at > 20
