"""Generates parts of the reference pages from the code.

A page contains pairs of comments, ``<!-- generated: NAME -->`` and ``<!-- end -->``, and this script replaces the text
between them. Run ``python docs/generate.py`` after you change options, config keys, commands, hooks or docstrings. With
``--check``, nothing is changed, and the script fails if a page is outdated.
"""  # noqa: INP001  # a script, not a package

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import json
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from types import UnionType
from typing import Any

import attrs
import typer
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

import profdeck_traces as traces
from profdeck import engines, plugin, profiler, server_capture
from profdeck.backends import api, hookspecs, plugins
from profdeck.base.errors import CaptureError
from profdeck.base.observer import Observer
from profdeck.base.outcome import Outcome
from profdeck.cli import _commands, app
from profdeck.config import model, options, schedule
from profdeck.config.targets import TargetsConfig
from profdeck.engine.options import EngineOptions
from profdeck.on_demand import client
from profdeck.records import capture, status
from profdeck.records.manifest import Manifest
from profdeck_traces.analysis import (
    classes,
    diff_model,
    host_states,
)
from profdeck_traces.analysis.model import RunSummary
from profdeck_traces.base import entry_points
from profdeck_traces.base.errors import ProfdeckError
from profdeck_traces.cli import terminal
from profdeck_traces.findings import (
    account_rules,
    device_rules,
    engine_rules,
    fleet_rules,
    host_rules,
    rollout_rules,
    run_rules,
)
from profdeck_traces.reading import trace
from profdeck_traces.trend.model import Trend

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "tests"))

from gpu.parts import PARTS  # noqa: E402  # requires the sys.path entry above

WIDTH = 100

_BLOCK = re.compile(r"(<!-- generated: (?P<name>[a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_SECTION = re.compile(r"^(Args|Returns|Raises|Yields):\n((?: {4}.*\n?|\n)+)", re.MULTILINE)
_TYPES = {
    "AicMetrics | None": "the name of a set of counters",
    "Auth": "`token` or `none`",
    "FinishConfig": "mapping with the [keys of finish](#keys-of-finish)",
    "float | None": "number",
    "Iterations | None": "mapping with the [keys of iterations](#keys-of-iterations)",
    "Level": "`level_none`, `level0`, `level1` or `level2`",
    "Mapping[str, Any]": "mapping",
    "Mapping[str, Mapping[str, Any]]": "mapping of names to mappings",
    "Mapping[str, RoleConfig]": "mapping of role names to [role keys](#keys-of-a-role)",
    "Mode": "`continuous` or `discrete`",
    "OnError": "`warn` or `raise`",
    "Path": "path",
    "Policy": "`any`, `quorum` or `all`",
    "Path | None": "path",
    "SampleBy": "`number` or `load`",
    "Schedule": "list of [steps](#steps)",
    "TargetsConfig | None": "mapping with the [keys of targets](#keys-of-targets)",
    "Window | None": "mapping with the [keys of a window](#keys-of-a-window)",
    "bool": "bool",
    "bool | str": "bool, or the name of a store",
    "float": "number",
    "int": "integer",
    "int | None": "integer",
    "str": "text",
    "str | None": "text",
    "str | tuple[int, ...]": "`all` or a list of integers",
    "tuple[Activity, ...]": "list of activities",
    "tuple[Activity, ...] | None": "list of activities",
    "tuple[BatchKind, ...]": "list of `prefill`, `decode` and `mixed`",
    "tuple[Export, ...]": "list of `text` and `db`",
    "tuple[HostSystem, ...]": "list of what is sampled",
    "tuple[WorkerType, ...]": "list of `regular`, `prefill` and `decode`",
    "tuple[int, ...] | None": "list of integers",
    "tuple[str, ...]": "list of texts",
}
_JSON_TYPES: dict[Any, str] = {bool: "boolean", float: "number", int: "integer", str: "string", type(None): "null"}
_SCHEMAS = {"manifest": Manifest, "summary": RunSummary, "diff": diff_model.RunDiff, "trend": Trend}
_ROLE = re.compile(r":(?:class|func|meth|mod):`~?(?:\w+\.)*(\w+)`")


def main() -> None:
    """Generate or check all pages."""
    stale = [page for page, text in pages() if not page.exists() or page.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv[1:]:
        names = ", ".join(page.relative_to(DOCS.parent).as_posix() for page in stale)
        sys.exit(f"Outdated: {names}. Run: python docs/generate.py" if stale else 0)
    for page, text in pages():
        page.write_text(text, encoding="utf-8")


def pages() -> Iterator[tuple[Path, str]]:
    """Yield each page with generated parts, and its current text."""
    for page in sorted(DOCS.rglob("*.md")):
        old = page.read_text(encoding="utf-8")
        new = _BLOCK.sub(lambda match: f"{match[1]}\n{BLOCKS[match['name']]().strip()}\n\n{match[3]}", old)
        if _BLOCK.search(old):
            yield page, new
    for name, cls in _SCHEMAS.items():
        yield DOCS / "reference" / f"{name}.schema.json", schema(cls)


# Config and options.


def keys(cls: type, prefix: str = "") -> str:
    """Return the reference of a config model's keys."""
    return "".join(entry(doc, f"{prefix}{doc.name}") for doc in options.describe(cls))


def entry(doc: options.OptionDoc, name: str) -> str:
    """Return the section of one key or option."""
    required = " Required." if doc.default == "required" else ""
    if doc.type not in _TYPES:
        raise SystemExit(f"{name} has the type {doc.type}. Add a description of this type to _TYPES in {__file__}.")
    text = doc.text.replace("`profdeck.config.schedule.GRAMMAR` describes", "[Steps](#steps) describes")
    return f"### `{name}`\n\nType: {_TYPES[doc.type]}.{required}\n\n{prose(text)}\n\n"


def step_grammar() -> str:
    """Return the grammar of an entry of ``steps``."""
    marked = re.sub(r"'([^']*)'", r"`\1`", schedule.GRAMMAR)
    return f"An entry is {marked}."


def provided_backends() -> dict[str, type[api.Backend]]:
    """Load the backends of the distribution profdeck."""
    points = entry_points.installed(plugins.BACKENDS).values()
    return {point.name: plugins.load_backend(point.name) for point in points if is_from_profdeck(point)}


def engine_options() -> str:
    """Return the reference of the options that all engine backends share, without the common options."""
    common = options.describe(options.CommonOptions)
    return "".join(entry(doc, doc.name) for doc in options.describe(EngineOptions) if doc not in common)


def backend_options() -> str:
    """Return the reference of each backend's own options."""
    common = [*options.describe(options.CommonOptions), *options.describe(EngineOptions)]
    text = ""
    for name, cls in provided_backends().items():
        supported = ", ".join(f"{library.names[0]} `{library.versions}`" for library in cls.libraries)
        text += f"## Backend `{name}`\n\n{prose(inspect.getdoc(cls))}\n\nSupports {supported}.\n\n"
        text += "".join(entry(doc, doc.name) for doc in options.describe(cls.Options) if doc not in common)
    return text


# The command line.


def commands() -> Iterator[tuple[str, ...]]:
    """Yield the words of every subcommand of profdeck."""

    def below(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        if not isinstance(command, TyperGroup):
            yield words
            return
        for name in command.list_commands(typer.Context(command)):
            yield from below(command.get_command(typer.Context(command), name), (*words, name))

    foreign = {point.name for point in metadata.entry_points(group=_commands.COMMANDS) if not is_from_profdeck(point)}
    yield from (words for words in below(get_command(app), ()) if words[0] not in foreign)


def usage(*words: str) -> str:
    """Return the help of a command."""
    result = CliRunner().invoke(app, [*words, "--help"], prog_name="profdeck", terminal_width=WIDTH)
    if result.exit_code:
        raise SystemExit(f"profdeck {' '.join(words)} --help failed: {result.output}")
    return result.output.strip()


def overview() -> str:
    """Return the common options and a table of all commands."""
    rows = []
    for words in sorted(commands()):
        _, _, about = usage(*words).partition("\n\n")
        sentence = " ".join(about.partition("\n\n")[0].split())
        name = f"profdeck {' '.join(words)}"
        rows.append((f"[`{name}`](#{name.replace(' ', '-')})", sentence))
    options_only = usage().partition("\n\nCapture:")[0]
    return f"```text\n{options_only}\n```\n\n{table(('Command', 'Description'), rows)}"


def subcommands() -> str:
    """Return the help of every subcommand."""
    return "\n\n".join(
        f"## `profdeck {' '.join(words)}`\n\n```text\n{usage(*words)}\n```" for words in sorted(commands())
    )


def exit_codes() -> str:
    """Return a table of the exit codes."""
    rows = [(f"`{terminal.ExitCode[name].value}`", text) for name, text in member_docs(terminal.ExitCode)]
    return table(("Code", "Meaning"), rows)


# Classes.


def statuses() -> str:
    """Return a table of the statuses of a capture."""
    rows = [(f"`{status.Status[name].value}`", text) for name, text in member_docs(status.Status)]
    return table(("Status", "Meaning"), rows)


def outcomes() -> str:
    """Return a table of the outcomes of a target."""
    rows = [(f"`{Outcome[name].value}`", text) for name, text in member_docs(Outcome)]
    return table(("Outcome", "Meaning"), rows)


def error_classes() -> str:
    """Return a nested list of the error classes."""
    modules = {ProfdeckError.__module__, CaptureError.__module__}

    def below(cls: type, depth: int) -> str:
        line = f"{'  ' * depth}- `{cls.__name__}`: {prose(inspect.getdoc(cls))}\n"
        children: list[type] = cls.__subclasses__()
        return line + "".join(below(child, depth + 1) for child in children if child.__module__ in modules)

    return below(ProfdeckError, 0)


def members(cls: type, *, level: str = "###") -> str:
    """Return the reference of a class's variables and public methods."""
    text = ""
    for name, doc in member_docs(cls):
        text += f"{level} `{name}`\n\n{prose(doc)}\n\n"
    for name, value in vars(cls).items():
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if name.startswith("_") or not (inspect.isfunction(function) or isinstance(value, property)):
            continue
        source: Any = function.fget if isinstance(function, property) else function
        if (inspect.getdoc(source) or "").startswith("Async version of `"):  # its signature is that of the sync method
            text += f"{level} `{name}`\n\n{docstring(source)}\n\n"
            continue
        text += f"{level} `{name}`\n\n```python\n{signature(source, called=source is function)}\n```\n\n"
        text += f"{docstring(source)}\n\n"
    return text


def signature(function: Callable[..., Any], *, called: bool) -> str:
    """Return the signature of a function, or the name and type of a property."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)  # noqa: S101  # for the type checker
    if node.args.args and node.args.args[0].arg in {"self", "cls"}:
        node.args.args = node.args.args[1:]
    if (extra := node.args.vararg) and extra.annotation and ast.unparse(extra.annotation) == "Never":
        node.args.vararg = node.args.kwarg = None  # exist only to report unexpected arguments
    arguments = re.sub(r"=(?=\S)", " = ", ast.unparse(node.args)).replace("'", '"')
    arguments = re.sub(r"= _\w+", "= ...", arguments)
    start = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    result = ast.unparse(node.returns) if node.returns else "None"
    line = f"{start} {node.name}({arguments}) -> {result}" if called else f"{node.name}: {result}"
    if len(line) <= WIDTH:
        return line
    broken = re.sub(r", (?=\*|\w+:)", ",\n    ", arguments)
    return f"{start} {node.name}(\n    {broken},\n) -> {result}"


def docstring(function: Callable[..., Any]) -> str:
    """Convert a Google-style docstring to Markdown."""

    def section(match: re.Match[str]) -> str:
        body = textwrap.dedent(match[2]).strip()
        items = re.split(r"\n(?=\S)", body) if match[1] in {"Args", "Raises"} else [body]
        listed = [prose(re.sub(r"^(\w+): ", r"`\1`: ", " ".join(item.split()))) for item in items]
        return f"{match[1]}:\n\n" + "\n".join(f"- {item}" for item in listed) + "\n\n"

    return prose(_SECTION.sub(section, inspect.getdoc(function) or "")).strip()


def request_functions() -> str:
    """Return the reference of the functions that request a capture, and of their request and result classes."""
    parts = []
    for function, *models in (
        (server_capture.capture_servers, server_capture.ServerRequest, server_capture.ServerCapture),
        (server_capture.acapture_servers, server_capture.ServerObserver, Observer),
        (client.capture_job, client.JobRequest, client.JobCapture, client.ProcessCapture),
    ):
        parts.append(f"### `{function.__name__}`\n\n```python\n{signature(function, called=True)}\n```\n")
        parts.append(f"{docstring(function)}\n")
        parts += [f"#### `{cls.__name__}`\n\n{inspect.getdoc(cls)}\n\n{members_table(cls)}\n" for cls in models]
    return "\n".join(parts)


def members_table(cls: type) -> str:
    """Return a table of a class's members with the first paragraph of each docstring."""
    rows = [(f"`{name}`", doc) for name, doc in member_docs(cls)]
    for name, value in vars(cls).items():
        if name.startswith("_") or not (inspect.isfunction(value) or isinstance(value, property)):
            continue
        parameters = [*inspect.signature(value).parameters][1:] if inspect.isfunction(value) else []
        title = f"{name}({', '.join(parameters)})" if inspect.isfunction(value) else name
        rows.append((f"`{title}`", " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())))
    return table(("Member", "Description"), rows)


def member_docs(cls: type) -> list[tuple[str, str]]:
    """Return the names and docstrings of a class's variables."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)  # noqa: S101  # for the type checker
    docs: list[tuple[str, str]] = []
    for variable, text in zip(node.body, node.body[1:], strict=False):
        match variable, text:
            case (
                ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(doc))),
            ):
                docs.append((name, " ".join(doc.split())))
    return docs


# Traces.


def schema(root: type) -> str:
    """Return the JSON Schema of a result class and its nested classes."""
    described = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$ref": f"#/$defs/{root.__name__}",
        "$defs": {cls.__name__: schema_of_class(cls) for cls in nested_classes(root)},
    }
    return json.dumps(described, indent=2, ensure_ascii=False) + "\n"


def schema_of_class(cls: type) -> dict[str, Any]:
    """Return the JSON Schema of one class."""
    hints = typing.get_type_hints(cls)
    docs = {name: doc for base in cls.__mro__[::-1] if attrs.has(base) for name, doc in member_docs(base)}
    properties = {}
    for field in attrs.fields(cls):
        properties[field.name] = schema_of_type(hints[field.name])
        if field.name in docs:
            properties[field.name]["description"] = prose(docs[field.name].replace("None", "null")).replace("`", "")
    required = [field.name for field in attrs.fields(cls) if field.default is attrs.NOTHING]
    return {"type": "object", "description": inspect.getdoc(cls), "properties": properties, "required": required}


def schema_of_type(hint: Any) -> dict[str, Any]:
    """Return the JSON Schema of a type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    result: dict[str, Any]
    if isinstance(hint, UnionType):
        result = {"anyOf": [schema_of_type(inner) for inner in arguments]}
    elif origin is tuple:
        is_list = arguments[-1] is Ellipsis
        result = {"type": "array", "items": schema_of_type(arguments[0])}
        result |= {} if is_list else {"minItems": len(arguments), "maxItems": len(arguments)}
    elif origin is dict:
        result = {"type": "object", "additionalProperties": schema_of_type(arguments[1])}
    elif origin is typing.Literal:
        result = {"enum": list(arguments)}
    elif hint is Any:
        result = {}
    elif issubclass(hint, StrEnum):
        result = {"enum": [member.value for member in hint]}
    else:
        result = {"$ref": f"#/$defs/{hint.__name__}"} if attrs.has(hint) else {"type": _JSON_TYPES[hint]}
    return result


def nested_classes(cls: type) -> list[type]:
    """Return a result class and its nested classes without duplicates, in order of first use."""
    result = [cls]
    for current in result:  # the list grows during the iteration
        for hint in typing.get_type_hints(current).values():
            nested = [inner for inner in alternatives(hint) if attrs.has(inner)]
            result += [inner for inner in nested if inner not in result]
    return result


def alternatives(hint: Any) -> Iterator[Any]:
    """Yield the types in a union, and the element types of a tuple."""
    if isinstance(hint, UnionType) or typing.get_origin(hint) is tuple:
        for inner in typing.get_args(hint):
            yield from alternatives(inner)
    elif hint is not Ellipsis:
        yield hint


def idle_causes() -> str:
    """Return a table of the causes of device idle time."""
    return table(
        ("Cause", "Meaning"), [(name, f"{text[0].upper()}{text[1:]}.") for name, text in host_states.CAUSES.items()]
    )


def findings() -> str:
    """Return a table of the causes in accounts, and a list of the other rules."""
    single = [rule for rules in (device_rules.RULES, host_rules.RULES) for rule in rules]
    rules: list[Callable[..., Any]] = [*single, run_rules.skew, run_rules.slow_stage, *run_rules.RULES]
    rules += [rule for of_engines in (engine_rules, fleet_rules, rollout_rules) for rule in of_engines.RULES]
    rules += [run_rules.few_steps, run_rules.cold_steps, run_rules.slow_recording, run_rules.incomplete]
    of_account = table(("Cause", "Meaning"), [(f"`{cause}`", text) for cause, text in account_rules.conditions()])
    return of_account + "\n\n" + "\n".join(f"- {' '.join((rule.__doc__ or '').split())}" for rule in rules)


def kernel_classes() -> str:
    """Return the names of the built-in kernel classes."""
    names = sorted({category for category, _ in classes._TABLE})  # noqa: SLF001  # no public list exists
    return ", ".join(f"`{name}`" for name in names)


def trace_names() -> str:
    """Return tables of the public names of profdeck_traces."""
    return public_names(traces.SECTIONS)


def public_names(sections: Mapping[str, Mapping[str, str]]) -> str:
    """Return tables of a module's public names, grouped by subject."""
    return "\n\n".join(f"### {title}\n\n{names_table(homes)}" for title, homes in sections.items())


def names_table(homes: Mapping[str, str]) -> str:
    """Return a table of names with the first paragraph of their docstrings.

    Args:
        homes: Maps each module to its names, separated by spaces.
    """
    rows = [
        (f"`{signature_of(home, name)}`", first_paragraph(home, name))
        for home, names in homes.items()
        for name in names.split()
    ]
    return table(("Name", "Description"), rows)


def signature_of(home: str, name: str) -> str:
    """Return a name. For a function, append its parameters."""
    value = getattr(importlib.import_module(home), name)
    return f"{name}({', '.join(inspect.signature(value).parameters)})" if inspect.isfunction(value) else name


def first_paragraph(home: str, name: str) -> str:
    """Return the first paragraph of the docstring of a class, function or assignment.

    Raises:
        SystemExit: There is no docstring.
    """
    module = importlib.import_module(home)
    body = ast.parse(inspect.getsource(module)).body
    for node, following in itertools.pairwise([*body, None]):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            match following:
                case ast.Expr(ast.Constant(str(text))):
                    return " ".join(text.partition("\n\n")[0].split())
    doc: str | None = getattr(module, name).__doc__
    if not doc:
        raise SystemExit(f"{home}.{name} has no docstring.")
    return " ".join(doc.partition("\n\n")[0].split())


# Text.


def table(headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = [headings, ("---",) * len(headings), *((prose(cell).replace("|", r"\|") for cell in row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# Hardware.


def gpu_results() -> list[dict[str, Any]]:
    """Read the results of `make gpu`, sorted by date."""
    files = sorted((DOCS / "hardware").glob("*.json"))
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    for file, result in zip(files, results, strict=True):
        if not result["host"]["gpu"]:
            raise SystemExit(f"{file} was not recorded on a GPU. Remove this file.")
    return sorted(results, key=lambda result: str(result["date"]))


def last_gpu_run(backend: str) -> str:
    """Return the date and the GPU of a backend's last run, or ``never``."""
    names = {part.name for part in PARTS if part.backend == backend}
    for result in reversed(gpu_results()):
        if any(part["status"] != "skipped" for name, part in result["parts"].items() if name in names):
            return f"{result['date']} on {result['host']['gpu']}"
    return "never"


def gpu_table() -> str:
    """Return a Markdown table with the latest result of each part of `make gpu`."""
    headings = ("Backend", "Feature", "Last run", "GPU", "Driver", "torch", "Engine", "Outcome", "Figures")
    rows = []
    for part in PARTS:
        row: tuple[str, ...] = (part.backend, part.feature, "never", *[""] * 6)
        for result in gpu_results():
            part_result = result["parts"].get(part.name, {"status": "skipped"})
            if part_result["status"] == "skipped":
                continue
            host, versions = result["host"], result["host"]["versions"]
            engine = f"vLLM {versions['vllm']}" if part.backend == "vllm" else ""
            figures = "; ".join(f"{name}: {value}" for name, value in part_result["figures"].items())
            outcome = (
                f"{part_result['status']}: {part_result['reason']}"
                if "reason" in part_result
                else part_result["status"]
            )
            host_cells = (host["gpu"], host["driver"] or "", versions["torch"], engine)
            row = (part.backend, part.feature, result["date"], *host_cells, outcome, figures)
        rows.append(row)
    return table(headings, rows)


def prose(text: str | None) -> str:
    """Convert code markup of docstrings to Markdown."""
    return _ROLE.sub(r"`\1`", text or "").replace("``", "`")


def is_from_profdeck(point: metadata.EntryPoint) -> bool:
    """Return whether an entry point belongs to the distribution profdeck."""
    return point.dist is not None and point.dist.name == "profdeck"


BLOCKS: dict[str, Callable[[], str]] = {
    "config-keys": lambda: keys(model.Config),
    "role-keys": lambda: keys(model.RoleConfig, "roles.<role>."),
    "window-keys": lambda: keys(schedule.Window, "roles.<role>.window."),
    "iterations-keys": lambda: keys(schedule.Iterations, "roles.<role>.iterations."),
    "targets-keys": lambda: keys(TargetsConfig, "roles.<role>.targets."),
    "finish-keys": lambda: keys(model.FinishConfig, "finish."),
    "step-grammar": step_grammar,
    "common-options": lambda: keys(options.CommonOptions),
    "engine-options": engine_options,
    "backend-options": backend_options,
    "overview": overview,
    "subcommands": subcommands,
    "exit-codes": exit_codes,
    "statuses": statuses,
    "outcomes": outcomes,
    "errors": error_classes,
    "hooks": lambda: members(hookspecs.Hooks),
    "backend-class": lambda: members(api.Backend),
    "engine-backend-class": lambda: members(api.EngineBackend),
    "target-state": lambda: members(api.TargetState, level="####"),
    "library-class": lambda: members(api.Library),
    "profiler": lambda: members(profiler.Profiler),
    "findings": findings,
    "idle-causes": idle_causes,
    "kernel-classes": kernel_classes,
    "capture-class": lambda: members_table(capture.Capture),
    "engine-capture-class": lambda: members_table(capture.EngineCapture),
    "request-functions": request_functions,
    "trace-functions": trace_names,
    "plugin-names": lambda: public_names(plugin.SECTIONS),
    "engine-names": lambda: public_names(engines.SECTIONS),
    "gpu-results": gpu_table,
    "trace-class": lambda: members(trace.Trace),
}

if __name__ == "__main__":
    main()
