"""Tests for the redaction of credentials in messages, records and terminal output."""

from __future__ import annotations

import asyncio
import base64
import json
import stat
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from captured_runs import write_run
from gpu_job import GpuJob
from profdeck.after_capture.finish_record import FinishRecord, FinishState, create_record, read_record, write_record
from profdeck.base.errors import TargetError
from profdeck.cli import app
from profdeck.config.structuring import structure
from profdeck.config.targets import TargetsConfig
from profdeck.engine.transport.http_engine import HttpEngine
from profdeck.remote.upload import upload
from profdeck_traces.base.credentials import redact, redact_url, redact_values
from profdeck_traces.base.documents import show
from profdeck_traces.base.errors import ConfigError, ProfdeckError, describe_error
from profdeck_traces.inputs.url_copies import fetch
from profdeck_traces.inputs.urls import RemotePath
from remote_stores import RecordingStore
from simulated_servers import Act, SimulatedServer

SECRET = "sesame-0123456789"  # noqa: S105  # not a real password
TOKEN = "tok/en+0123456789=="  # noqa: S105  # as above
START = {"id": "step1"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ftp://user:p@ss@host/dir", "ftp://***@host/dir"),
        ("ftp://user:pa/ss@host/dir", "ftp://***@host/dir"),
        ("ftp://user:p@s/s@host/dir", "ftp://***@host/dir"),
        ("ftp://user:p?s#s@host/dir", "ftp://***@host/dir"),
        ("https://user:p%40ss@host/dir", "https://***@host/dir"),
        ("https://:password@host", "https://***@host"),
        ("simplecache::ftp://user:secret@host/dir", "simplecache::ftp://***@host/dir"),
        ("zip://a.json::https://user:secret@host/a.zip", "zip://a.json::https://***@host/a.zip"),
        ("ftp:/user:secret@host/dir", "ftp:/***@host/dir"),
        ("https://a:1/x and https://user:secret@b:2/y", "https://a:1/x and https://***@b:2/y"),
        ("FileNotFoundError: https://h:80/x?sig=abc%2Fdef: Repeat.", "FileNotFoundError: https://h:80/x: Repeat."),
        ("404, url='https://h/x?X-Amz-Signature=abc'", "404, url='https://h/x'"),
        ("https://h/#access_token=abc", "https://h/"),
        ("https://h/job;sig=a%2Fb/rank0.json: 403", "https://h/job/rank0.json: 403"),
        ("https://h/a;v=2;jsessionid=abc;X-Amz-Signature=def?x=1.", "https://h/a;v=2."),
        ("https:/h/job;sig=abc/x", "https:/h/job/x"),
        ("(zip://a.json::https://u:p@h/a.zip;access_key=abc)", "(zip://a.json::https://***@h/a.zip)"),
        ("via http://proxy/ftp%3A%2F%2Fuser%3Asecret%40host", "via http://proxy/ftp%3A%2F%2F***%40host"),
        ("{'Authorization': 'Bearer abc.def'}", "{'Authorization': 'Bearer ***'}"),
        ("Invalid header value: b'X-API-Key: abc'", "Invalid header value: b'X-API-Key: ***'"),
        ("Proxy-Authorization: Basic dXNlcjpwYXNz", "Proxy-Authorization: Basic ***"),
        ("got Bearer 0123456789abc", "got Bearer ***"),
        ("Authorization: Bearer abc", "Authorization: Bearer ***"),
        ("Authorization: Negotiate YIIabcdef", "Authorization: Negotiate ***"),
        ("Authorization: AWS4-HMAC-SHA256 Credential=AKID/x, Signature=abc", "Authorization: AWS4-HMAC-SHA256 ***"),
        ('Authorization: Digest username="u", response="abc"', "Authorization: Digest ***"),
        ("Cookie: a=1; session=abc", "Cookie: ***"),
        ("AWS_SECRET_ACCESS_KEY=abc PASSWORD='abc' cmd", "AWS_SECRET_ACCESS_KEY=*** PASSWORD='***' cmd"),
        ("//user:secret@host/dir", "//***@host/dir"),
        ("connect to //user:p@ss@host: refused", "connect to //***@host: refused"),
        ("password: hunter2", "password: ***"),
        ("db: {api-key: abc, user: joe}", "db: {api-key: ***, user: joe}"),
        ("secret: s3cret was rejected", "secret: *** was rejected"),
        ("password: 'two words'", "password: '***'"),
        ('password="two words" user=joe', 'password="***" user=joe'),
        ("['--password', 'hunter2']", "['--password', '***']"),
        ("--token x1y2 --steps 3", "--token *** --steps 3"),
        ("got hf_abcdEFGH12345678ijklMNOP.", "got ***."),
        ("key sk-proj-abc123def456ghi789jkl0", "key ***"),
        ("https://host/ghp_abcdefghijklmnop1234567890", "https://host/***"),
        ("AKIAIOSFODNN7EXAMPLE", "***"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-_", "***"),
    ],
)
def test_credentials_in_text_are_masked(text: str, expected: str) -> None:
    assert redact(text) == expected
    assert str(ProfdeckError(text)) == expected
    assert describe_error(OSError(text)) == f"OSError: {expected}"


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/user@host/dir",
        "http://127.0.0.1:8000/dir@1/x",
        "http://[::1]:8000 is not reachable by user@host",
        "gpu7:/john@company/run",
        "https://docs.example/page#anchor",
        "https://host/rank;tp=1;mode=key/x; sig=1",
        "Set PROFDECK_TOKEN to the server's token.",
        "tokens=12 token=5 max_tokens=1",
        "TOKEN=$SLURM_TOKEN cmd",
        "unix:/run/engine.sock",
        "token: expected a string, got 5",
        "PROFDECK_TOKEN: the token's file cannot be read",
        "Unexpected token: } (line 5)",
        "--token is unknown here",
        "api_key: None, token: null",
        "hf_transfer, hf_hub_download and sk-learn",
        "//host:8000/dir@1 and // comment a:b@c",
    ],
)
def test_other_text_is_not_changed(text: str) -> None:
    assert redact(text) == text


def test_secrets_of_a_url_are_masked_in_any_encoding() -> None:
    url = f"ftp://user:p%40ss-word@host/x?sig={SECRET}"
    assert redact(f"login 'p@ss-word' 'p%40ss-word' {SECRET} {url}", url) == "login '***' '***' *** ftp://***@host/x"
    url = f"https://host/x;sig={SECRET}/y"
    assert redact(f"{SECRET} {url}", url) == "*** https://host/x/y"
    assert redact_url(url) == "https://host/x/y"


def test_password_of_a_url_can_contain_whitespace() -> None:
    assert redact_url("https://user:sec\nret @host/my dir?a=1") == "https://***@host/my dir"


def test_secret_values_and_urls_in_data_are_masked() -> None:
    data = {"url": f"ftp://u:{SECRET}@h", "api_key": SECRET, "nested": [{"password": SECRET}, ("x", 1)], "keys": 3}
    assert redact_values(data) == {
        "url": "ftp://***@h",
        "api_key": "***",
        "nested": [{"password": "***"}, ("x", 1)],
        "keys": 3,
    }


def test_shortened_values_contain_no_part_of_a_password() -> None:
    assert "ppp" not in show(f"https://user:{'p' * 200}@host")
    with pytest.raises(ConfigError) as caught:
        structure({"urls": [f"https//user:{SECRET}@host"]}, TargetsConfig, where="targets")
    assert "urls" in str(caught.value)


@pytest.mark.parametrize("scheme", ["simplecache::recording", "wrong", "simplecache::wrong", "http"])
def test_messages_and_tracebacks_of_remote_files_contain_no_password(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROFDECK_CACHE", str(tmp_path))
    RecordingStore.empty()
    url = f"{scheme}://user:p@{SECRET}@127.0.0.1:1/job"
    with pytest.raises(ProfdeckError) as caught:
        fetch(url)
    assert SECRET not in str(caught.getrepr())
    assert "://***@" in str(caught.value)
    if "wrong" not in scheme:
        assert SECRET not in repr(RemotePath.from_url(url))


def test_usage_errors_and_json_contain_no_password(tmp_path: Path) -> None:
    url = f"ftp://user:{SECRET}@host/run"
    for command in (
        ["ls", "run", url],
        [url],
        ["prune", url, "--steps", "1"],
        ["config", "show", "--set", f"run={url}"],
    ):
        result = CliRunner().invoke(app, command)
        assert SECRET not in result.output
        assert result.exit_code


def test_echoed_token_is_masked_in_messages_and_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROFDECK_TOKEN", TOKEN)

    async def main() -> None:
        async with SimulatedServer() as server:
            engine = HttpEngine(server.url, timeout_s=30)
            echo = f"no access with 'Bearer {TOKEN}'"
            for content in (echo, json.dumps({"error": echo}), json.dumps({"error": echo}).replace("/", "\\/")):
                server.acts["start"] = [Act(status=403, content=content.encode())]
                with pytest.raises(TargetError, match="no access with") as caught:
                    await engine.command("start", START)
                assert TOKEN not in str(caught.value)
            reply = {"rank": 0, "world_size": 1, "host": "gpu7", "pid": 1, "state": "idle", "problems": [echo]}
            server.acts["start"] = [Act(content=json.dumps({"answer": {"ranks": [reply | {"error": echo}]}}).encode())]
            (rank,) = (await engine.command("start", START)).ranks
            assert TOKEN not in f"{rank}"
            await engine.close()
            basic = base64.b64encode(f"user:{SECRET}".encode()).decode()
            engine = HttpEngine(server.url.replace("//", f"//user:{SECRET}@"), timeout_s=30)
            server.acts["start"] = [Act(status=403, content=f"{basic} {SECRET}".encode())]
            with pytest.raises(TargetError, match=r"status 403: \*\*\* \*\*\*$"):
                await engine.command("start", START)
            await engine.close()

    asyncio.run(main())


def test_finish_record_with_a_credential_is_private_and_not_uploaded(tmp_path: Path) -> None:
    RecordingStore.empty()
    run = write_run(tmp_path / "job", 1, lambda _: GpuJob(ranks=1))
    (run / "run.json").write_text("{}")
    path = run / "step_000000" / "finish.step0.json"
    command = f"curl ftp://user:{SECRET}@host"
    record = FinishRecord(
        capture="step0", first_step=0, command=command, listeners=(), timeout_s=1, wait_s=1, state=FinishState.DONE
    )
    create_record(path, record)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    write_record(path, record)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_record(path).command == command
    upload(run, "recording://profiles")
    assert not [name for name, file in RecordingStore.store.items() if SECRET.encode() in file.getvalue()]


def test_credentials_in_json_are_masked() -> None:
    assert redact('status 403: {"client_secret": "hunter22", "max_tokens": 512}') == (
        'status 403: {"client_secret": "***", "max_tokens": 512}'
    )


@pytest.mark.parametrize(
    "unit",
    [
        *(
            "a",
            "token",
            "x-a-",
            "http://",
            ":a",
            "a:b@ ",
            '"',
            " ",
            "//a:b",
            "token: ",
            "token='",
            "'token': \"",
            "sk-",
        ),
        *(";sig=", ";sig=.", ";key", "hf_", "authorization: a;b=", "cookie: a=b; ", "eyJaaaaaaaa.", "--token "),
    ],
)
@pytest.mark.parametrize("end", ["", "@"])
def test_time_is_linear_in_the_length_of_a_message(unit: str, end: str) -> None:
    began = time.process_time()
    redact(f"https://host/{unit * (200_000 // len(unit))}{end}")
    assert time.process_time() - began < 5.0
