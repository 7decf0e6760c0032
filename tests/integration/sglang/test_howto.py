"""Executes docs/how-to/sglang.md, against a server started as the page says and with engines of the tiny model."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from servers import busy

from profdeck.records.status import Status
from profdeck.verification.reading import read_run

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "how-to" / "sglang.md"
# What the engine of the tiny model needs besides its path, as arguments in Python.
TINY = (
    'load_format="dummy", device="cpu", dtype="float32", disable_cuda_graph=True, grammar_backend="none", '
    'attention_backend="torch_native", sampling_backend="pytorch", context_length=256, max_total_tokens=2048, '
    "max_running_requests=8, sleep_on_idle=True"
)


@pytest.fixture(scope="module")
def pages() -> Iterator[ModuleType]:
    """The executor of pages, which is a test module: those are no packages."""
    spec = importlib.util.spec_from_file_location("pages", ROOT / "tests" / "integration" / "test_readme.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["pages"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["pages"]


def test_every_command_for_a_server(pages: ModuleType, start_server: Callable[..., Any], tmp_path: Path) -> None:
    shell = pages.Shell(tmp_path)
    shell.environment |= {"PROFDECK_TOKEN": "a-secret"}
    found = [block for block in pages.blocks(PAGE) if block.skipped == "needs an SGLang server"]
    files = {block.file: block.text for block in found if block.file}
    (shell.directory / "server.yaml").write_text(files["server.yaml"])
    server = start_server(
        SGLANG_PLUGINS="profdeck",
        PROFDECK_CONFIG=str(shell.directory / "server.yaml"),
        PROFDECK__OUTPUT=str(shell.directory / "profiles"),  # the server has a working directory of its own
        PROFDECK_TOKEN="a-secret",  # noqa: S106  # the page's
    )
    with busy(server):
        for block in found:
            for command, _ in block.commands() if block.language == "console" else ():
                shell.run(block, command.replace("http://127.0.0.1:30000", server.url), [], 0)
    runs = shell.directory / "profiles"
    for name in ("first", "shapes", "merged", "whole"):
        assert read_run(runs / name).status is Status.COMPLETE
    assert (runs / "merged" / "step_000000" / "server" / "target.step0.merged.json.gz").is_file()
    roles = {path.name for path in (runs / "whole" / "step_000000").iterdir()}
    assert roles == {"server", "server-tokenizer", "server-detokenizer"}


def test_an_engine_without_profdeck(pages: ModuleType, start_server: Callable[..., Any], tmp_path: Path) -> None:
    shell = pages.Shell(tmp_path)
    reason = "needs a server with SGLang's own profiler"
    (block,) = [block for block in pages.blocks(PAGE) if block.skipped == reason]
    server = start_server(SGLANG_PLUGINS="torchcpu")
    with busy(server):
        for command, _ in block.commands():
            shell.run(block, command.replace("http://127.0.0.1:30000", server.url), [], 0)
    assert read_run(shell.directory / "profiles" / "native").status is Status.COMPLETE


@pytest.mark.parametrize("name", ["rollout.py", "rl.py"])
def test_the_scripts(
    pages: ModuleType, model: Path, engine_environment: dict[str, str], tmp_path: Path, name: str
) -> None:
    shell = pages.Shell(tmp_path)
    shell.environment |= engine_environment | {"PATH": shell.environment["PATH"]}
    found = {block.file: block for block in pages.blocks(PAGE) if block.file}
    (shell.directory / "rollout.yaml").write_text(found["rollout.yaml"].text)
    script = found[name].text.replace('"MODEL"', f"{str(model)!r}, {TINY}")
    assert script != found[name].text
    (shell.directory / name).write_text(script)
    shell.run(found[name], f"SGLANG_PLUGINS=profdeck python {name}", [], 0)
    report = read_run(shell.directory / "profiles" / "rl")
    assert {target.first_step for target in report.targets} == {1, 3}
    assert report.status is Status.COMPLETE
