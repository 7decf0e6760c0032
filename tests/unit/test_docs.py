"""The docs say what the code says: all of it is documented, nothing is stale, every link leads somewhere."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import jsonschema
import pytest
from typer.testing import CliRunner

import profdeck
from profdeck import Backend, Capture, Identity, Profiler
from profdeck.after_capture.finish_record import CommandResult, FinishRecord, FinishState
from profdeck.after_capture.work_in_progress import FinishReport
from profdeck.backends import plugins
from profdeck.backends.api import EngineBackend, TargetState
from profdeck.backends.hookspecs import Hooks
from profdeck.base import errors as capture_errors
from profdeck.base.launchers import installed_launchers
from profdeck.cli import app
from profdeck.config.model import Config, FinishConfig, RoleConfig
from profdeck.config.options import CommonOptions, describe
from profdeck.config.schedule import Iterations, Window
from profdeck.config.targets import TargetsConfig
from profdeck.records.artifact import Artifact, ClockAnchor
from profdeck.records.manifest import ArtifactRecord, Manifest
from profdeck.records.request import BatchKind, CaptureRequest, Recorded, Reply, RequestState
from profdeck.records.status import Status
from profdeck.records.targets import TargetRecord
from profdeck.verification.report_model import TargetReport
from profdeck_traces.base import entry_points, errors
from profdeck_traces.cli.terminal import ExitCode

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [*(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")), *sorted(DOCS.rglob("*.md"))]

FORBIDDEN = ("/work/", "/root/", "/home/", "USDT:", "site-packages")
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def reference(name: str) -> str:
    return (REFERENCE / f"{name}.md").read_text(encoding="utf-8")


def missing(page: str, names: Iterator[str] | list[str]) -> list[str]:
    """Return the names that a reference page does not have as code."""
    text = reference(page)
    return [name for name in names if not re.search(rf"[`(\"]{re.escape(name)}[`(\",=]", text)]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_parts_are_current(generator: ModuleType) -> None:
    for page, text in generator.pages():
        assert page.read_text(encoding="utf-8") == text, f"{page} is stale; run: python docs/generate.py"


def test_readme_states_the_last_gpu_run(generator: ModuleType) -> None:
    rows = re.findall(r"^\| (PyTorch|vLLM) \|.*[Ll]ast run on a GPU: (.+?)(?: \(|\.)", README, re.MULTILINE)
    assert rows == [("PyTorch", generator.last_gpu_run("torch")), ("vLLM", generator.last_gpu_run("vllm"))]


def test_gpu_table_contains_the_latest_result_of_each_part(
    generator: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the last run skipped a part, the table contains the result of an earlier run."""
    host = {"gpu": "NVIDIA H100", "driver": "580.1", "versions": {"torch": "2.11.0+cu130", "vllm": "0.26.0"}}
    passed, skipped = {"status": "passed", "figures": {"step ms": 3}}, {"status": "skipped", "reason": "none"}
    failed = {"status": "failed", "figures": {}, "reason": "a: 1, not 2"}
    runs = [
        {"date": "2026-01-01", "host": host, "parts": {"probe": failed, "training": failed}},
        {"date": "2026-02-01", "host": host, "parts": {"probe": passed, "training": skipped, "vllm_eager": passed}},
    ]
    monkeypatch.setattr(generator, "gpu_results", lambda: runs)
    lines = generator.gpu_table().splitlines()
    rows = {part.name: line for part, line in zip(generator.PARTS, lines[2:], strict=True)}
    about = "NVIDIA H100 | 580.1 | 2.11.0+cu130"
    assert rows["probe"].endswith(f"| 2026-02-01 | {about} |  | passed | step ms: 3 |")
    assert rows["training"].endswith(f"| 2026-01-01 | {about} |  | failed: a: 1, not 2 |  |")
    assert rows["vllm_eager"].endswith(f"| 2026-02-01 | {about} | vLLM 0.26.0 | passed | step ms: 3 |")
    assert rows["nccl"].endswith("| never |  |  |  |  |  |  |")
    assert generator.last_gpu_run("vllm") == "2026-02-01 on NVIDIA H100"


def test_cpu_results_are_rejected(generator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hardware").mkdir()
    (tmp_path / "hardware" / "cpu.json").write_text(json.dumps({"host": {"gpu": None}}))
    monkeypatch.setattr(generator, "DOCS", tmp_path)
    with pytest.raises(SystemExit, match="was not recorded on a GPU"):
        generator.gpu_results()


def test_every_generated_part_is_on_a_page(generator: ModuleType) -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
    assert [name for name in generator.BLOCKS if f"<!-- generated: {name} -->" not in text] == []


def test_every_hook_is_documented() -> None:
    hooks = [name for name in vars(Hooks) if not name.startswith("_")]
    assert len(hooks) == 5
    assert [name for name in hooks if not getattr(Hooks, name).__doc__] == []
    assert missing("hooks", hooks) == []


def test_every_member_of_backends_is_documented() -> None:
    for cls in (Backend, EngineBackend, TargetState):
        names = [name for name in {**vars(cls), **cls.__annotations__} if not name.startswith("_")]
        assert missing("hooks", [name for name in names if name != "options"]) == [], cls


def test_every_option_of_every_backend_is_documented() -> None:
    assert entry_points.installed(plugins.BACKENDS), "profdeck is not installed"
    for point in entry_points.installed(plugins.BACKENDS).values():
        options = describe(plugins.load_backend(point.name).Options)
        assert [option.name for option in options if not option.text] == [], point.name
        assert missing("options", [option.name for option in options]) == [], point.name


def test_every_config_key_is_documented() -> None:
    assert missing("config", [field.name for field in attrs.fields(Config)]) == []
    assert missing("config", [f"roles.<role>.{field.name}" for field in attrs.fields(RoleConfig)]) == []
    assert missing("config", [f"roles.<role>.window.{field.name}" for field in attrs.fields(Window)]) == []
    assert missing("config", [f"roles.<role>.iterations.{field.name}" for field in attrs.fields(Iterations)]) == []
    assert missing("config", [f"roles.<role>.targets.{field.name}" for field in attrs.fields(TargetsConfig)]) == []
    assert missing("config", [f"finish.{field.name}" for field in attrs.fields(FinishConfig)]) == []
    for model in (Config, RoleConfig, Window, Iterations, TargetsConfig, FinishConfig, CommonOptions):
        assert [key.name for key in describe(model) if not key.text] == [], model


def test_every_subcommand_and_its_options_are_documented(generator: ModuleType) -> None:
    page = reference("cli")
    commands = list(generator.commands())
    assert {command[0] for command in commands} >= {
        "plugins",
        "capture",
        "check",
        "config",
        "demo",
        "ls",
        "nsys-args",
        "run",
        "summary",
        "diff",
        "trim",
        "merge",
    }
    for command in commands:
        section = page.partition(f"\n## `profdeck {' '.join(command)}`\n")[2].partition("\n## ")[0]
        options = re.findall(r"--[a-z][a-z-]+", generator.usage(*command))
        assert options
        assert [option for option in options if option not in section] == [], command


def test_every_exit_code_is_documented() -> None:
    section = reference("cli").partition("## Exit codes")[2].partition("\n## ")[0]
    assert [code for code in ExitCode if f"| `{code.value}` |" not in section] == []


def test_every_environment_variable_is_documented() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in source_files())
    used = set(re.findall(r"\bPROFDECK_(?!_)[A-Z_]+[A-Z]\b", source))
    assert used >= {"PROFDECK_CONFIG", "PROFDECK_RUN", "PROFDECK_PARALLEL", "PROFDECK_LEASE_DIR"}
    assert missing("config", [*used, "PROFDECK__<KEY>__<KEY>"]) == []


def test_every_launcher_variable_is_documented() -> None:
    launchers = installed_launchers()
    assert {launcher.name for launcher in launchers} >= {"torchrun", "slurm", "ray"}
    ranks = [
        name for launcher in launchers for name in (launcher.rank, launcher.world_size, launcher.local_rank) if name
    ]
    assert missing("config", ranks) == []
    jobs = [
        name
        for launcher in launchers
        for name in (launcher.job_id, launcher.local_world_size, *(launcher.rendezvous or ()))
        if name
    ]
    assert [name for name in jobs if name not in reference("run-directory")] == []


def test_every_key_of_manifests_is_documented() -> None:
    models = (Manifest, ArtifactRecord, ClockAnchor, TargetRecord, FinishRecord, CommandResult)
    keys = [field.name for model in models for field in attrs.fields(model)]
    assert missing("run-directory", keys) == []
    assert missing("run-directory", [status.value for status in Status]) == []
    assert missing("run-directory", [state.value for state in FinishState if state is not FinishState.NOT_RUN]) == []


def test_every_key_of_server_routes_is_documented() -> None:
    keys = [field.name for model in (CaptureRequest, Reply, Recorded) for field in attrs.fields(model)]
    assert missing("server-routes", keys) == []
    assert missing("server-routes", [*RequestState, *BatchKind]) == []


def test_every_public_name_is_documented() -> None:
    assert missing("python-api", list(profdeck.__all__)) == []
    classes = [
        name for part in (errors, capture_errors) for name, value in vars(part).items() if isinstance(value, type)
    ]
    assert missing("python-api", [name for name in classes if name.endswith("Error")]) == []
    for model in (Capture, Artifact, Identity):
        public = [name for name in dir(model) if not name.startswith("_")]
        fields = [field.name for field in attrs.fields(model)]
        assert missing("python-api", [*public, *fields]) == [], model
    assert missing("python-api", [name for name in vars(Profiler) if not name.startswith("_")]) == []


@pytest.mark.usefixtures("tally")
def test_every_key_of_json_output_is_documented(tmp_path: Path) -> None:
    settings = {"output": str(tmp_path), "run": "run", "steps": [1], "trainer.backend": "tally"}
    with Profiler.from_config(settings=settings).capture(1):
        pass
    config = tmp_path / "profdeck.yaml"
    config.write_text("steps: [1]\nroles: {trainer: {backend: tally}}\n")
    page = reference("cli")
    run = str(tmp_path / "run")
    (trace,) = map(str, (tmp_path / "run").rglob("*.trace.json"))
    schemas = {
        name: json.loads((DOCS / "reference" / f"{name}.schema.json").read_text())
        for name in ("summary", "diff", "trend")
    }
    of_results = {key for schema in schemas.values() for cls in schema["$defs"].values() for key in cls["properties"]}
    for command in (
        ["check", str(config)],
        ["config", "show", str(config)],
        ["plugins"],
        ["plugins", "torch"],
        ["ls", run],
        ["summary", run],
        ["diff", run, run, "--fail-over", "5%"],
        ["trend", run],
        ["trim", trace, "--category", "cpu_op", "-o", str(tmp_path / "part.json")],
        ["merge", run, "-o", str(tmp_path / "all.json")],
    ):
        section = page.partition(f"### JSON of `{' '.join(command[: 2 if command[0] == 'config' else 1])}`")[2]
        result = CliRunner().invoke(app, [*command, "--json"])
        document = json.loads(result.stdout)
        if command == ["plugins", "torch"]:  # the keys of the schema are those of JSON Schema and the options
            jsonschema.Draft202012Validator.check_schema(document["plugins"][0].pop("options_schema"))
        keys = set(json_keys(document))
        if command[0] in schemas:
            jsonschema.validate(document, schemas[command[0]])
        if command[0] == "ls":
            models = (TargetReport, TargetRecord, FinishReport)
            keys |= {field.name for model in models for field in attrs.fields(model)}
        example_keys = set(re.findall(r'"(\w+)":', section.partition("\n### ")[0]))
        if "(trace-json.md" in section.partition("\n### ")[0]:
            example_keys |= of_results
        assert keys
        assert keys - example_keys - {status.value for status in Status} == set(), command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_target_exists(page: Path) -> None:
    for link in _LINK.findall(_FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page}: {link}: there is no such file"
        assert target.is_relative_to(ROOT), f"{page}: {link}: leads out of the repository"
        if anchor:
            assert anchor in anchors(target), f"{page}: {link}: there is no such heading"


def test_every_page_is_linked_from_the_index() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    linked = {(DOCS / link.partition("#")[0]).resolve() for link in _LINK.findall(index)}
    assert [page for page in DOCS.rglob("*.md") if page not in linked and page.name != "index.md"] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_contain_no_local_paths(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [text_fragment for text_fragment in FORBIDDEN if text_fragment in text] == []


def source_files() -> Iterator[Path]:
    for folder in ("core", "plugins"):
        yield from (ROOT / folder).rglob("*.py")


def json_keys(document: Any) -> Iterator[str]:
    if isinstance(document, dict):
        yield from document
        for value in document.values():
            yield from json_keys(value)
    elif isinstance(document, list):
        for value in document:
            yield from json_keys(value)


def anchors(page: Path) -> set[str]:
    """Return the anchors that the headings of a page have on GitHub."""
    counts: dict[str, int] = {}
    result = set()
    for heading in re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE):
        heading_text = _LINK.sub(lambda match: match[0].partition("]")[0], heading)
        slug = re.sub(r"[^\w\- ]", "", heading_text.lower()).replace(" ", "-")
        number = counts.get(slug, 0)
        counts[slug] = number + 1
        result.add(f"{slug}-{number}" if number else slug)
    return result


def test_pictures_are_current() -> None:
    """`docs/pictures.py` makes them; each holds a digest of what decides how it looks."""
    spec = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    for name in pictures.SOURCES:
        picture = (DOCS / "images" / name).read_bytes()
        assert pictures.recorded(picture) == pictures.digest(name), f"{name} is stale; run: python docs/pictures.py"
        assert len(picture) < 300_000
