"""Checks of the source tree, such as unique class names and allowed imports."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
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
        ("fallback.py", "__init__"),  # each parser decodes to its own class
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


# The modules in these directories keep their text until they are rewritten.
NOT_YET_EDITED = {"analysis", "findings", "merge", "reading", "writing"}
PROSE = [file for file in CODE if NOT_YET_EDITED.isdisjoint(file.parts)]
MAX_WORDS = 30


def docstrings(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and text of all docstrings in a file, including those of attributes and constants."""
    for node in ast.walk(parse(file)):
        for statement in getattr(node, "body", ()) if not isinstance(node, ast.Lambda | ast.IfExp) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text


def test_docstrings_start_with_a_noun_or_a_verb() -> None:
    clause = re.compile(r"(What|Who|Whose|Which|Whether|How|Where|When|Says?|Tells?)\b")
    assert [
        f"{file.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for file in PROSE
        for line, text in docstrings(file)
        if clause.match(text)
    ] == []


def test_sentences_in_docstrings_are_short() -> None:
    ends = re.compile(r"[.:;!?)]\s|\n\s*\n|\n\s*[-*]\s")
    literal_block = re.compile(r"::\n\n(?: +.*\n?|\n)+")
    assert [
        f"{file.relative_to(ROOT)}:{line}: {' '.join(sentence.split())}"
        for file in PROSE
        for line, text in docstrings(file)
        for sentence in ends.split(literal_block.sub("\n\n", inspect.cleandoc(text)))
        if len(sentence.split()) > MAX_WORDS
    ] == []
