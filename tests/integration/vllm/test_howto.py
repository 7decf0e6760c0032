"""Executes docs/how-to/vllm.md, against a server started as the page says and with engines of the tiny model."""

from __future__ import annotations

import importlib.util
import shutil
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
PAGE = ROOT / "docs" / "how-to" / "vllm.md"


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
    found = [block for block in pages.blocks(PAGE) if block.skipped == "needs a vLLM server"]
    files = {block.file: block.text for block in found if block.file}
    (shell.directory / "server.yaml").write_text(files["server.yaml"])
    server = start_server(
        VLLM_PLUGINS="profdeck",
        PROFDECK_CONFIG=str(shell.directory / "server.yaml"),
        PROFDECK__OUTPUT=str(shell.directory / "profiles"),  # the server has a working directory of its own
        PROFDECK_TOKEN="a-secret",  # noqa: S106  # the page's
    )
    with busy(server):
        for block in found:
            for command, _ in block.commands() if block.language == "console" else ():
                shell.run(block, command.replace("http://127.0.0.1:8000", server.url), [], 0)
    runs = shell.directory / "profiles"
    for name in ("first", "shapes", "merged"):
        assert read_run(runs / name).status is Status.COMPLETE
    assert (runs / "merged" / "step_000000" / "server" / "target.step0.merged.json.gz").is_file()


def test_the_scripts(pages: ModuleType, model: Path, engine_environment: dict[str, str], tmp_path: Path) -> None:
    shell = pages.Shell(tmp_path)
    shell.environment |= engine_environment | {"PATH": shell.environment["PATH"]}
    tiny = f'{str(model)!r}, load_format="dummy", enforce_eager=True, max_model_len=256, dtype="float32"'
    found = {block.file: block for block in pages.blocks(PAGE) if block.file}
    (shell.directory / "rollout.yaml").write_text(found["rollout.yaml"].text)
    for name, steps in (("rollout.py", {1, 3}), ("rl.py", {1, 3})):
        shutil.rmtree(shell.directory / "profiles", ignore_errors=True)
        script = found[name].text.replace('"MODEL"', tiny)
        assert script != found[name].text
        (shell.directory / name).write_text(script)
        shell.run(found[name], f"VLLM_PLUGINS=profdeck python {name}", [], 0)
        report = read_run(shell.directory / "profiles" / "rl")
        assert {target.first_step for target in report.targets} == steps
        assert report.status is Status.COMPLETE
