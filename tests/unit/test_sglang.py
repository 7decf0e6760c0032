"""The SGLang backend without SGLang: options, the names of files, replies, and what loads in the engine's processes."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distributions import install
from profdeck import Profiler
from profdeck.base.errors import TargetError
from profdeck.base.identity import Identity
from profdeck.base.outcome import Outcome
from profdeck.config.structuring import structure, unstructure
from profdeck.engine.control.engine_profiler import TraceOrigin
from profdeck.records.capture import CaptureRecord
from profdeck.records.request import Answer, BatchKind, CaptureRequest, Reply, RequestState
from profdeck_sglang import autoload, protocol
from profdeck_sglang.backend import SglangBackend
from profdeck_sglang.engines import SglangObject
from profdeck_sglang.options import SglangOptions
from profdeck_sglang.own_profiler import SglangCapture
from profdeck_sglang.server import SglangServer
from profdeck_traces.base.errors import ConfigError

URL = "http://127.0.0.1:1"

# Options.


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"start_step": 0}, "start_step"),
        ({"start_step": 5, "profile_by_stage": True}, "profile_by_stage counts prefill and decode separately"),
        ({"stage_min_batch_size": -1}, "stage_min_batch_size"),
        ({"detailed_annotations": "yes"}, "detailed_annotations"),
        ({"activities": []}, "the list is empty"),
        ({"activities": ["MEM"]}, "MEM"),
        ({"device_options": {"record_shapes": True}}, "give record_shapes as options of their own"),
        ({"merge_profile": True}, "Did you mean 'merge_profiles'?"),
        ({"flush_timeout_s": 0}, "flush_timeout_s"),
    ],
)
def test_wrong_options_are_refused_by_name(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        structure(options, SglangOptions, where="options")


def test_the_defaults_are_the_cheapest() -> None:
    options = SglangOptions()
    assert (options.with_stack, options.record_shapes) == (False, False)  # SGLang's own default is both
    assert options.for_processes() == {
        "start_step": None,
        "min_decode_batch": 0,
        "detailed": False,
        "tokenizer": False,
        "detokenizer": False,
    }


def test_options_complete_a_request() -> None:
    asked = CaptureRequest(id="step1", output=Path("/profiles"), run="run", role="rollout")
    options = SglangOptions(profile_by_stage=True, ignore_frontend=False, with_stack=True, stage_min_batch_size=4)
    request = options.complete(asked)
    assert request.batch_kinds == (BatchKind.PREFILL, BatchKind.DECODE, BatchKind.MIXED)
    assert request.options["with_stack"] is True
    assert (request.engine["tokenizer"], request.engine["detokenizer"]) == (True, True)
    assert request.engine["min_decode_batch"] == 4


@pytest.mark.parametrize(
    ("role", "text"),
    [
        ({"iterations.count": 0}, "iterations"),  # such as a window whose end is its start
        ({"iterations.count": 2, "iterations.skip": -1}, "iterations"),
        ({"iterations.count": 2, "iterations.first": 3}, "the engine starts captures without a host"),
        ({"batch_kinds": ["extend"]}, "batch_kinds[0]: expected one of prefill, decode, mixed"),
        ({"window.active": 2}, "use iterations"),
        ({"warmup_steps": 1}, "use iterations"),
    ],
)
def test_a_wrong_role_is_refused_before_an_engine_is_asked(role: dict[str, Any], text: str) -> None:
    values = {"steps": [1], "rollout.backend": "sglang"} | {f"rollout.{key}": value for key, value in role.items()}
    with pytest.raises(ConfigError, match=re.escape(text)):
        Profiler.from_config(settings=values, role="rollout", target=URL)


def test_a_target_that_is_no_engine_of_sglang_is_refused() -> None:
    with pytest.raises(ConfigError, match="builtins.object is not an SGLang engine"):
        SglangObject(object(), timeout_s=1)
    with pytest.raises(ConfigError, match="is no URL of a server"):
        SglangBackend(SglangOptions()).connect("127.0.0.1:30000")


# The names that SGLang's own profiler gives to files.


def native(tmp_path: Path, **launched: Any) -> SglangCapture:
    """A capture of a server that was launched so."""
    identity = Identity(role="rollout")
    capture = CaptureRecord(id="target", directory=tmp_path, identity=identity, first_step=1, current_step=1)
    request = CaptureRequest(id="step1", output=tmp_path, run="run", role="rollout", token="0123")  # noqa: S106
    made = SglangCapture(SglangServer(URL, timeout_s=1), SglangOptions(), capture, request)
    made._launch_arguments = launched
    return made


@pytest.mark.parametrize(
    ("launched", "name", "place"),
    [
        ({"tp_size": 1}, "TP-0", TraceOrigin(0)),
        ({"tp_size": 4}, "TP-3", TraceOrigin(3, {"tp": 3})),
        ({"tp_size": 2, "pp_size": 2}, "TP-1-PP-1", TraceOrigin(3, {"tp": 1, "pp": 1})),
        ({"tp_size": 1, "pp_size": 2}, "TP-0-PP-1", TraceOrigin(1, {"pp": 1})),
        ({"tp_size": 1, "dp_size": 2}, "TP-0-DP-1", TraceOrigin(1, {"dp": 1})),
        ({"tp_size": 2, "dp_size": 3}, "TP-1-DP-2", TraceOrigin(5, {"tp": 1, "dp": 2})),
        ({"tp_size": 2, "pp_size": 2, "dp_size": 2}, "TP-1-DP-1-PP-0", TraceOrigin(5, {"tp": 1, "dp": 1, "pp": 0})),
        ({"tp_size": 2, "pp_size": 2, "dp_size": 2}, "TP-1-DP-1-PP-1", TraceOrigin(7, {"tp": 1, "dp": 1, "pp": 1})),
        # Experts are spread over the ranks of tensor parallelism.
        ({"tp_size": 4, "ep_size": 4}, "TP-2-EP-2", TraceOrigin(2, {"tp": 2, "ep": 2})),
        ({"tp_size": 2, "dp_size": 2}, "TP-1-DP-1-EP-0", TraceOrigin(3, {"tp": 1, "dp": 1, "ep": 0})),
        # And so are the replicas of data-parallel attention.
        ({"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}, "TP-3-DP-1", TraceOrigin(3, {"tp": 3, "dp": 1})),
        (
            {"tp_size": 2, "pp_size": 2, "dp_size": 2, "enable_dp_attention": True},
            "TP-1-DP-1-PP-1",
            TraceOrigin(3, {"tp": 1, "dp": 1, "pp": 1}),
        ),
        # A server tells null where it was told nothing.
        (
            {"tp_size": 2, "pp_size": None, "dp_size": None, "enable_dp_attention": None},
            "TP-1",
            TraceOrigin(1, {"tp": 1}),
        ),
    ],
)
def test_the_name_of_a_trace_tells_the_rank(
    tmp_path: Path, launched: dict[str, Any], name: str, place: TraceOrigin
) -> None:
    assert native(tmp_path, **launched).place(tmp_path / f"step1-0123-{name}.trace.json.gz") == place


def test_every_rank_has_a_name_and_a_number_of_its_own(tmp_path: Path) -> None:
    capture = native(tmp_path, tp_size=2, pp_size=3, dp_size=2)
    names = [f"TP-{tp}-DP-{dp}-PP-{pp}" for dp in range(2) for pp in range(3) for tp in range(2)]
    places = [capture.place(tmp_path / f"step1-0123-{name}.trace.json.gz") for name in names]
    assert [place.rank for place in places if place] == list(range(12))


@pytest.mark.parametrize(
    "name",
    [
        "merged-step1-0123.trace.json.gz",
        "step1-0123-TP-0-EXTEND.trace.json.gz",
        "step1-0123-TP-0-DECODE.trace.json.gz",
        "1790000000.5-TP-0-memory.pickle",
        "step1-0123-TP-0.trace.json.gz.tmp",
        "step1-0123-TP-.trace.json.gz",
        "rank0.1790000000.pt.trace.json.gz",
    ],
)
def test_other_files_are_no_ranks(tmp_path: Path, name: str) -> None:
    assert native(tmp_path, tp_size=1).place(tmp_path / name) is None


# Replies.


def reply(rank: int = 0, **more: Any) -> Reply:
    return Reply(rank=rank, world_size=2, host="node", pid=1, state=RequestState.ENDED, **more)


def test_a_reply_comes_back_as_it_was_sent() -> None:
    sent = reply(1, request="step1", token="0123", problems=("Ünïcode, \n and “quotes”.",), error="refused")  # noqa: S106
    assert protocol.unpack_reply(protocol.pack_reply(sent)) == sent


@pytest.mark.parametrize(
    "message", ["Succeeded", "", None, 5, "Profiling is not in progress. Call /start_profile first."]
)
def test_an_answer_of_sglang_itself_is_no_reply(message: object) -> None:
    assert protocol.unpack_reply(message) is None


class ForeignRequest:
    """A request to SGLang's own profiler, as far as it is read to tell it from ours."""

    def __init__(self, profile_id: object) -> None:
        self.profile_id = profile_id


@pytest.mark.parametrize("profile_id", [None, "1790000000.5", "", 7])
def test_a_request_to_sglangs_own_profiler_is_none_of_ours(profile_id: object) -> None:
    request: Any = ForeignRequest(profile_id)
    assert protocol.unpack(request) is None


def test_a_reply_is_there_once_it_is_whole(tmp_path: Path) -> None:
    assert protocol.read_reply(tmp_path, "rank_0") is None
    (tmp_path / ".rank_0.ab12.tmp").write_text('{"rank": 0, "wor')  # it is being written
    assert protocol.read_reply(tmp_path, "rank_0") is None
    protocol.write_reply(tmp_path, "rank_0", reply())
    assert protocol.read_reply(tmp_path, "rank_0") == reply()
    assert {path.name for path in tmp_path.iterdir()} == {".rank_0.ab12.tmp", "rank_0"}


def test_who_reads_while_replies_are_left_never_sees_a_part_of_one(tmp_path: Path) -> None:
    over = threading.Event()

    def leave() -> None:
        number = 0
        while not over.is_set():
            number += 1
            protocol.write_reply(tmp_path, "rank_0", reply(problems=("x" * (number % 50) * 1000,)))

    writer = threading.Thread(target=leave)
    writer.start()
    try:
        found = [protocol.read_reply(tmp_path, "rank_0") for _ in range(200)]
    finally:
        over.set()
        writer.join()
    assert all(item is None or item.rank == 0 for item in found)


def test_a_reply_that_nobody_waits_for_is_dropped_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    protocol.write_reply(tmp_path / "gone", "detokenizer", reply())
    assert not caplog.records


def test_a_reply_that_cannot_be_written_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        protocol.write_reply(tmp_path / "file", "rank_1", reply())
    assert "Could not write the reply of rank_1" in caplog.text


# What SGLang loads.


@pytest.mark.parametrize(
    ("environ", "armed"),
    [
        ({}, False),
        ({"PROFDECK_CONFIG": ""}, False),
        ({"PROFDECK_CONFIG": "profdeck.yaml"}, True),
        ({"PROFDECK__OUTPUT": "profiles"}, True),
        ({"PROFDECK_LEASE_DIR": "/leases"}, False),
        ({"SGLANG_PLUGINS": "other"}, False),
        ({"SGLANG_PLUGINS": "profdeck2"}, False),
        ({"SGLANG_PLUGINS": "profdeck"}, True),
        ({"SGLANG_PLUGINS": "other, profdeck"}, True),  # SGLang strips them, too
    ],
)
def test_what_arms_an_engine(environ: dict[str, str], armed: bool) -> None:
    assert autoload.is_enabled(environ) is armed


REGISTRY = '''
"""Stands where SGLang keeps its hooks, and applies none."""
import enum

class HookType(enum.Enum):
    AFTER = "after"
    AROUND = "around"

class HookRegistry:
    _patched = set()
    registered = []

    @classmethod
    def register(cls, target, hook, kind):
        cls.registered.append(target)
'''


@pytest.fixture
def with_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, str]], None]]:
    """Make an SGLang that has some modules and nothing else."""

    def make(modules: dict[str, str]) -> None:
        for name, text in modules.items():
            file = tmp_path.joinpath("sglang", *name.split(".")).with_suffix(".py")
            file.parent.mkdir(parents=True)
            file.write_text(text)
            for package in file.relative_to(tmp_path).parents[:-1]:
                (tmp_path / package / "__init__.py").touch()
        install(tmp_path, "sglang", version="0.5.99")
        present = {name for name in sys.modules if name.partition(".")[0] == "sglang"}
        for name in present:  # where SGLang is installed and was imported
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.syspath_prepend(tmp_path)

    yield make
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]


@pytest.fixture
def unknown_sglang(with_modules: Callable[[dict[str, str]], None]) -> Any:
    """An SGLang that has a registry of hooks and nothing that we know to hook; returns its registry."""
    with_modules({"srt.plugins.hook_registry": REGISTRY})
    from sglang.srt.plugins.hook_registry import HookRegistry

    return HookRegistry


def test_hooks_that_are_not_found_are_told_and_none_is_registered(
    unknown_sglang: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from profdeck_sglang import applied_hooks

    monkeypatch.setenv("SGLANG_PLUGINS", "profdeck")
    with caplog.at_level(logging.ERROR):
        autoload.register()
    (record,) = caplog.records
    text = record.getMessage()
    assert "profdeck cannot record in this engine: SGLang 0.5.99 has no " in text
    for target in ("scheduler.Scheduler.__init__", "tokenizer_manager.TokenizerManager.__init__", "._profile"):
        assert target in text
    assert unknown_sglang.registered == []
    assert not applied_hooks.are_scheduler_hooks_applied()
    assert not applied_hooks.is_detokenizer_hook_applied()


def test_without_sglang_nothing_is_applied() -> None:
    from profdeck_sglang import applied_hooks

    assert "sglang" not in sys.modules or "sglang.srt.plugins.hook_registry" not in sys.modules
    assert not applied_hooks.are_scheduler_hooks_applied()
    assert not applied_hooks.is_detokenizer_hook_applied()


def test_replies_are_plain_json() -> None:
    message = protocol.pack_reply(reply())
    assert json.loads(message.removeprefix("profdeck:"))["state"] == "ended"


# Schedulers that do not answer.

REQUESTS = """
import enum

class ProfileReqType(enum.Enum):
    START_PROFILE = 1

class ProfileReq:
    __struct_fields__ = ("req_type", "profile_id", "activities", "start_step")

    def __init__(self, **fields):
        vars(self).update(fields)
"""


class Manager:
    """A tokenizer manager, as far as its schedulers are asked through it."""

    def __init__(self, *answers: Reply) -> None:
        """Args:
        answers: what the schedulers answer; nothing, ever, if there are none.
        """
        self.server_args = SimpleNamespace(skip_tokenizer_init=True)
        self.gracefully_exit = False
        self._answers = [SimpleNamespace(message=protocol.pack_reply(answer)) for answer in answers]

    def auto_create_handle_loop(self) -> None:
        self.event_loop = asyncio.get_running_loop()

    async def profile_communicator(self, _: object) -> Any:
        if not self._answers:
            await asyncio.Event().wait()
        return self._answers


@pytest.fixture
def asked(with_modules: Callable[[dict[str, str]], None], tmp_path: Path) -> Callable[..., Answer]:
    """Send a command about all ranks to the schedulers behind a manager, which have a moment for their answers."""
    with_modules({"srt.managers.io_struct": REQUESTS})
    request = CaptureRequest(id="step1", output=tmp_path, run="run", role="rollout", ranks="all")

    async def ask(engine: SglangObject, commands: tuple[str, ...]) -> Answer:
        about = {"request": request.id, "token": request.token}
        for command in commands:
            answer = await engine.command(command, unstructure(request) if command == "start" else about)
        return answer

    def ask_all(manager: Manager, *commands: str) -> Answer:
        return asyncio.run(ask(SglangObject(manager, timeout_s=0.1), commands))

    return ask_all


def test_schedulers_that_do_not_answer_are_late(asked: Callable[..., Answer]) -> None:
    with pytest.raises(TargetError, match=r"did not reply within rpc_timeout_s=0.1 seconds") as caught:
        asked(Manager(), "start")
    assert caught.value.outcome is Outcome.TIMED_OUT


def test_a_rank_that_does_not_answer_is_late(asked: Callable[..., Answer]) -> None:
    there, late = asked(Manager(reply()), "start").ranks
    assert (there.rank, there.error) == (0, None)
    assert (late.rank, late.refusal) == (1, Outcome.TIMED_OUT)
    assert late.error == "No reply within 0.1 seconds."
    there, late = asked(Manager(reply()), "start", "stop").ranks
    assert (late.error, late.refusal, late.problems) == (None, None, ("No reply within 0.1 seconds.",))
