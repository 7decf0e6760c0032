"""The SGLang backend without SGLang: options, trace names, replies and hooks."""

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
        ({"device_options": {"record_shapes": True}}, "set record_shapes next to device_options"),
        ({"merge_profile": True}, "Did you mean 'merge_profiles'?"),
        ({"flush_timeout_s": 0}, "flush_timeout_s"),
    ],
)
def test_invalid_option_is_rejected_by_name(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        structure(options, SglangOptions, where="options")


def test_defaults_have_the_lowest_overhead() -> None:
    options = SglangOptions()
    assert (options.with_stack, options.record_shapes) == (False, False)  # SGLang enables both by default
    assert options.for_processes() == {
        "start_step": None,
        "min_decode_batch": 0,
        "detailed": False,
        "tokenizer": False,
        "detokenizer": False,
    }


def test_options_complete_the_request() -> None:
    incomplete_request = CaptureRequest(id="step1", output=Path("/profiles"), run="run", role="rollout")
    options = SglangOptions(profile_by_stage=True, ignore_frontend=False, with_stack=True, stage_min_batch_size=4)
    request = options.complete(incomplete_request)
    assert request.batch_kinds == (BatchKind.PREFILL, BatchKind.DECODE, BatchKind.MIXED)
    assert request.options["with_stack"] is True
    assert (request.engine["tokenizer"], request.engine["detokenizer"]) == (True, True)
    assert request.engine["min_decode_batch"] == 4


@pytest.mark.parametrize(
    ("role", "text"),
    [
        ({"iterations.count": 0}, "iterations"),  # for example, a window whose end equals its start
        ({"iterations.count": 2, "iterations.skip": -1}, "iterations"),
        ({"iterations.count": 2, "iterations.first": 3}, "the engine starts captures without a host"),
        ({"batch_kinds": ["extend"]}, "batch_kinds[0]: expected one of prefill, decode, mixed"),
        ({"window.active": 2}, "use iterations"),
        ({"warmup_steps": 1}, "use iterations"),
    ],
)
def test_invalid_role_is_rejected_before_the_engine_is_queried(role: dict[str, Any], text: str) -> None:
    values = {"steps": [1], "rollout.backend": "sglang"} | {f"rollout.{key}": value for key, value in role.items()}
    with pytest.raises(ConfigError, match=re.escape(text)):
        Profiler.from_config(settings=values, role="rollout", target=URL)


def test_target_that_is_not_an_sglang_engine_is_rejected() -> None:
    with pytest.raises(ConfigError, match="builtins.object is not an SGLang engine"):
        SglangObject(object(), timeout_s=1)
    with pytest.raises(ConfigError, match="is not a valid server URL"):
        SglangBackend(SglangOptions()).connect("127.0.0.1:30000")


# File names of SGLang's own profiler.


def create_native_capture(tmp_path: Path, **launch_arguments: Any) -> SglangCapture:
    """Create a capture of a server with the given launch arguments."""
    identity = Identity(role="rollout")
    capture = CaptureRecord(id="target", directory=tmp_path, identity=identity, first_step=1, current_step=1)
    request = CaptureRequest(id="step1", output=tmp_path, run="run", role="rollout", token="0123")  # noqa: S106
    native_capture = SglangCapture(SglangServer(URL, timeout_s=1), SglangOptions(), capture, request)
    native_capture._launch_arguments = launch_arguments
    return native_capture


@pytest.mark.parametrize(
    ("launch_arguments", "name", "origin"),
    [
        ({"tp_size": 1}, "TP-0", TraceOrigin(0)),
        ({"tp_size": 4}, "TP-3", TraceOrigin(3, {"tp": 3})),
        ({"tp_size": 2, "pp_size": 2}, "TP-1-PP-1", TraceOrigin(3, {"tp": 1, "pp": 1})),
        ({"tp_size": 1, "pp_size": 2}, "TP-0-PP-1", TraceOrigin(1, {"pp": 1})),
        ({"tp_size": 1, "dp_size": 2}, "TP-0-DP-1", TraceOrigin(1, {"dp": 1})),
        ({"tp_size": 2, "dp_size": 3}, "TP-1-DP-2", TraceOrigin(5, {"tp": 1, "dp": 2})),
        ({"tp_size": 2, "pp_size": 2, "dp_size": 2}, "TP-1-DP-1-PP-0", TraceOrigin(5, {"tp": 1, "dp": 1, "pp": 0})),
        ({"tp_size": 2, "pp_size": 2, "dp_size": 2}, "TP-1-DP-1-PP-1", TraceOrigin(7, {"tp": 1, "dp": 1, "pp": 1})),
        # Expert parallelism is within the tensor-parallel ranks.
        ({"tp_size": 4, "ep_size": 4}, "TP-2-EP-2", TraceOrigin(2, {"tp": 2, "ep": 2})),
        ({"tp_size": 2, "dp_size": 2}, "TP-1-DP-1-EP-0", TraceOrigin(3, {"tp": 1, "dp": 1, "ep": 0})),
        # Data-parallel attention is within the tensor-parallel ranks, too.
        ({"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}, "TP-3-DP-1", TraceOrigin(3, {"tp": 3, "dp": 1})),
        (
            {"tp_size": 2, "pp_size": 2, "dp_size": 2, "enable_dp_attention": True},
            "TP-1-DP-1-PP-1",
            TraceOrigin(3, {"tp": 1, "dp": 1, "pp": 1}),
        ),
        # A server reports null for arguments that were not set.
        (
            {"tp_size": 2, "pp_size": None, "dp_size": None, "enable_dp_attention": None},
            "TP-1",
            TraceOrigin(1, {"tp": 1}),
        ),
    ],
)
def test_rank_is_parsed_from_the_trace_name(
    tmp_path: Path, launch_arguments: dict[str, Any], name: str, origin: TraceOrigin
) -> None:
    assert (
        create_native_capture(tmp_path, **launch_arguments).parse_name(tmp_path / f"step1-0123-{name}.trace.json.gz")
        == origin
    )


def test_ranks_of_trace_names_are_unique(tmp_path: Path) -> None:
    capture = create_native_capture(tmp_path, tp_size=2, pp_size=3, dp_size=2)
    names = [f"TP-{tp}-DP-{dp}-PP-{pp}" for dp in range(2) for pp in range(3) for tp in range(2)]
    origins = [capture.parse_name(tmp_path / f"step1-0123-{name}.trace.json.gz") for name in names]
    assert [origin.rank for origin in origins if origin] == list(range(12))


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
def test_other_file_names_are_ignored(tmp_path: Path, name: str) -> None:
    assert create_native_capture(tmp_path, tp_size=1).parse_name(tmp_path / name) is None


# Replies.


def build_reply(rank: int = 0, **fields: Any) -> Reply:
    return Reply(rank=rank, world_size=2, host="node", pid=1, state=RequestState.ENDED, **fields)


def test_reply_round_trip() -> None:
    sent = build_reply(1, request="step1", token="0123", problems=("Ünïcode, \n and “quotes”.",), error="refused")  # noqa: S106
    assert protocol.unpack_reply(protocol.pack_reply(sent)) == sent


@pytest.mark.parametrize(
    "message", ["Succeeded", "", None, 5, "Profiling is not in progress. Call /start_profile first."]
)
def test_messages_of_sglang_are_not_replies(message: object) -> None:
    assert protocol.unpack_reply(message) is None


class OwnProfilerRequest:
    """A request to SGLang's own profiler, with the field that distinguishes it from profdeck's requests."""

    def __init__(self, profile_id: object) -> None:
        self.profile_id = profile_id


@pytest.mark.parametrize("profile_id", [None, "1790000000.5", "", 7])
def test_requests_to_the_own_profiler_are_ignored(profile_id: object) -> None:
    request: Any = OwnProfilerRequest(profile_id)
    assert protocol.unpack(request) is None


def test_reply_is_read_after_it_is_complete(tmp_path: Path) -> None:
    assert protocol.read_reply(tmp_path, "rank_0") is None
    (tmp_path / ".rank_0.ab12.tmp").write_text('{"rank": 0, "wor')  # a temporary file of an incomplete write
    assert protocol.read_reply(tmp_path, "rank_0") is None
    protocol.write_reply(tmp_path, "rank_0", build_reply())
    assert protocol.read_reply(tmp_path, "rank_0") == build_reply()
    assert {path.name for path in tmp_path.iterdir()} == {".rank_0.ab12.tmp", "rank_0"}


def test_concurrent_reader_never_reads_a_partial_reply(tmp_path: Path) -> None:
    stopped = threading.Event()

    def write_replies() -> None:
        number = 0
        while not stopped.is_set():
            number += 1
            protocol.write_reply(tmp_path, "rank_0", build_reply(problems=("x" * (number % 50) * 1000,)))

    writer = threading.Thread(target=write_replies)
    writer.start()
    try:
        replies = [protocol.read_reply(tmp_path, "rank_0") for _ in range(200)]
    finally:
        stopped.set()
        writer.join()
    assert all(reply is None or reply.rank == 0 for reply in replies)


def test_reply_to_a_removed_directory_is_dropped_silently(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    protocol.write_reply(tmp_path / "gone", "detokenizer", build_reply())
    assert not caplog.records


def test_reply_that_cannot_be_written_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        protocol.write_reply(tmp_path / "file", "rank_1", build_reply())
    assert "Could not write the reply of rank_1" in caplog.text


# Hooks that profdeck registers in SGLang.


@pytest.mark.parametrize(
    ("environ", "is_enabled"),
    [
        ({}, False),
        ({"PROFDECK_CONFIG": ""}, False),
        ({"PROFDECK_CONFIG": "profdeck.yaml"}, True),
        ({"PROFDECK__OUTPUT": "profiles"}, True),
        ({"PROFDECK_LEASE_DIR": "/leases"}, False),
        ({"SGLANG_PLUGINS": "other"}, False),
        ({"SGLANG_PLUGINS": "profdeck2"}, False),
        ({"SGLANG_PLUGINS": "profdeck"}, True),
        ({"SGLANG_PLUGINS": "other, profdeck"}, True),  # SGLang also strips spaces
    ],
)
def test_hooks_are_enabled_by_the_environment(environ: dict[str, str], is_enabled: bool) -> None:
    assert autoload.is_enabled(environ) is is_enabled


REGISTRY = '''
"""Stub of SGLang's hook registry that applies no hooks."""
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
def install_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, str]], None]]:
    """Function that installs a stub of SGLang with the given modules only."""

    def install_modules(modules: dict[str, str]) -> None:
        for name, text in modules.items():
            file = tmp_path.joinpath("sglang", *name.split(".")).with_suffix(".py")
            file.parent.mkdir(parents=True)
            file.write_text(text)
            for package in file.relative_to(tmp_path).parents[:-1]:
                (tmp_path / package / "__init__.py").touch()
        install(tmp_path, "sglang", version="0.5.99")
        imported_modules = {name for name in sys.modules if name.partition(".")[0] == "sglang"}
        for name in imported_modules:  # SGLang may be installed and imported
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.syspath_prepend(tmp_path)

    yield install_modules
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]


@pytest.fixture
def empty_registry(install_sglang: Callable[[dict[str, str]], None]) -> Any:
    """Hook registry of an SGLang stub without the modules that profdeck hooks."""
    install_sglang({"srt.plugins.hook_registry": REGISTRY})
    from sglang.srt.plugins.hook_registry import HookRegistry

    return HookRegistry


def test_missing_hook_targets_are_logged_and_no_hook_is_registered(
    empty_registry: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
    assert empty_registry.registered == []
    assert not applied_hooks.are_scheduler_hooks_applied()
    assert not applied_hooks.is_detokenizer_hook_applied()


def test_no_hook_is_applied_without_sglang() -> None:
    from profdeck_sglang import applied_hooks

    assert "sglang" not in sys.modules or "sglang.srt.plugins.hook_registry" not in sys.modules
    assert not applied_hooks.are_scheduler_hooks_applied()
    assert not applied_hooks.is_detokenizer_hook_applied()


def test_replies_are_json() -> None:
    message = protocol.pack_reply(build_reply())
    assert json.loads(message.removeprefix("profdeck:"))["state"] == "ended"


# Schedulers that do not reply.

REQUESTS = """
import enum

class ProfileReqType(enum.Enum):
    START_PROFILE = 1

class ProfileReq:
    __struct_fields__ = ("req_type", "profile_id", "activities", "start_step")

    def __init__(self, **fields):
        vars(self).update(fields)
"""


class TokenizerManagerStub:
    """Stub of a tokenizer manager that forwards requests to schedulers."""

    def __init__(self, *replies: Reply) -> None:
        """Args:
        replies: replies of the schedulers. Without replies, the schedulers never reply.
        """
        self.server_args = SimpleNamespace(skip_tokenizer_init=True)
        self.gracefully_exit = False
        self._messages = [SimpleNamespace(message=protocol.pack_reply(reply)) for reply in replies]

    def auto_create_handle_loop(self) -> None:
        self.event_loop = asyncio.get_running_loop()

    async def profile_communicator(self, _: object) -> Any:
        if not self._messages:
            await asyncio.Event().wait()
        return self._messages


@pytest.fixture
def send_commands(install_sglang: Callable[[dict[str, str]], None], tmp_path: Path) -> Callable[..., Answer]:
    """Function that sends commands for all ranks to a manager's schedulers. The reply timeout is 0.1 seconds."""
    install_sglang({"srt.managers.io_struct": REQUESTS})
    request = CaptureRequest(id="step1", output=tmp_path, run="run", role="rollout", ranks="all")

    async def send(engine: SglangObject, commands: tuple[str, ...]) -> Answer:
        payload = {"request": request.id, "token": request.token}
        for command in commands:
            answer = await engine.command(command, unstructure(request) if command == "start" else payload)
        return answer

    def send_all(manager: TokenizerManagerStub, *commands: str) -> Answer:
        return asyncio.run(send(SglangObject(manager, timeout_s=0.1), commands))

    return send_all


def test_start_times_out_without_replies(send_commands: Callable[..., Answer]) -> None:
    with pytest.raises(TargetError, match=r"did not reply within rpc_timeout_s=0.1 seconds") as caught:
        send_commands(TokenizerManagerStub(), "start")
    assert caught.value.outcome is Outcome.TIMED_OUT


def test_missing_reply_of_a_rank_times_out(send_commands: Callable[..., Answer]) -> None:
    replied, timed_out = send_commands(TokenizerManagerStub(build_reply()), "start").ranks
    assert (replied.rank, replied.error) == (0, None)
    assert (timed_out.rank, timed_out.refusal) == (1, Outcome.TIMED_OUT)
    assert timed_out.error == "No reply within 0.1 seconds."
    replied, timed_out = send_commands(TokenizerManagerStub(build_reply()), "start", "stop").ranks
    assert (timed_out.error, timed_out.refusal, timed_out.problems) == (None, None, ("No reply within 0.1 seconds.",))
