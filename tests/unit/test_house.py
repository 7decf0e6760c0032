"""Checks of the source tree, such as unique class names and allowed imports."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = [*sorted((ROOT / "core").rglob("*.py")), *sorted((ROOT / "plugins").rglob("*.py"))]


@functools.cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def test_public_class_names_are_unique() -> None:
    files_by_class = defaultdict(list)
    for file in CODE:
        for node in parse(file).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files_by_class[node.name].append(str(file.relative_to(ROOT)))
    assert {name: files for name, files in files_by_class.items() if len(files) > 1} == {}


def test_core_does_not_branch_on_engine_names() -> None:
    """Comparisons, dicts and match statements in core must not contain engine names."""
    engines = re.compile(r"vllm|sglang", re.IGNORECASE)
    for file in (ROOT / "core").rglob("*.py"):
        for node in ast.walk(parse(file)):
            if isinstance(node, ast.Compare | ast.Dict | ast.Match):
                texts = [
                    constant.value
                    for constant in ast.walk(node)
                    if isinstance(constant, ast.Constant) and isinstance(constant.value, str)
                ]
                assert not any(engines.search(text) for text in texts), (file, texts)


def test_decoders_are_created_at_import() -> None:
    """If two threads create decoders of the same class at the same time, the process can crash.

    See `profdeck.base.json_files.JsonKind`.
    """
    allowed = {
        ("json_files.py", "__init__"),
        ("kineto_events.py", "_decoder"),  # called at import
        ("shape_fields.py", "_leniently"),  # the module has already decoded the class
        ("substitution.py", "__init__"),  # the classes are private to the module
    }
    created_in_functions = [
        f"{file.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)}"
        for file in CODE
        for function in ast.walk(parse(file))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        if (file.name, function.name) not in allowed
        for call in ast.walk(function)
        if isinstance(call, ast.Call)
        if (name := ast.unparse(call.func)) in {"JsonKind", "msgspec.convert"}
        or re.fullmatch(r"msgspec\.\w+\.Decoder", name)
        or (re.fullmatch(r"msgspec\.\w+\.decode", name) and any(keyword.arg == "type" for keyword in call.keywords))
    ]
    assert created_in_functions == []
