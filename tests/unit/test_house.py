"""The house is kept: which file is where, what its names mean, and what plugins may use of it."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CODE = [*sorted((ROOT / "core").rglob("*.py")), *sorted((ROOT / "plugins").rglob("*.py"))]
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md")), *sorted((ROOT / "docs").rglob("*.md"))]
MOST_LINES = 400
MOST_WORDS = 35_900

# Words that read as if translated, and what to write instead.
BANNED = {
    r"\b(stand|stands|stood) (in|beside|between|there|for itself)\b": "is",
    r"\btells? of\b": "say what it says",
    r"\banew\b": "again",
    r"\bgives? way\b": "say what happens",
    r"\bthere is said\b": "name who says it",
    r"\bit is said\b": "name who says it",
    r", and then[,.]": "split the sentence",
    r"\bwhoever\b": "name who",
    r"\bof which it cannot\b": "split the sentence",
}
_CODE = re.compile(r"^```.*?^```$|`[^`\n]*`|<!-- generated:.*?<!-- end -->", re.MULTILINE | re.DOTALL)


def imported_by_plugins() -> Iterator[tuple[Path, str]]:
    for file in (ROOT / "plugins").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "profdeck":
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                modules = [
                    name for name in names if (ROOT / "core" / name.replace(".", "/")).with_suffix(".py").exists()
                ]
                yield from ((file, module) for module in modules or [node.module])


def test_a_public_noun_means_one_thing() -> None:
    homes = defaultdict(list)
    for file in CODE:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(file.relative_to(ROOT)))
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_plugins_use_only_what_is_public() -> None:
    text = (ROOT / "docs" / "reference" / "python-api.md").read_text(encoding="utf-8")
    public = set(re.findall(r"`(profdeck(?:\.\w+)*)`", text.partition("## Modules for plugins")[2]))
    used = {module for _, module in imported_by_plugins()}
    assert used - public - {"profdeck"} == set(), "document it on the page, or use something that is"
    assert public - used - {"profdeck"} == set(), "no plugin needs it any more"


def test_files_have_one_subject_and_are_short() -> None:
    lines = {str(file.relative_to(ROOT)): len(file.read_text(encoding="utf-8").splitlines()) for file in CODE}
    assert {file: count for file, count in lines.items() if count > MOST_LINES} == {}


def test_the_docs_are_short() -> None:
    """Words of prose and tables; examples, which tests run, and bars of tables are none."""
    pages = [re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL) for page in DOCS.rglob("*.md")]
    assert sum(bool(re.search(r"\w", word)) for page in pages for word in page.split()) <= MOST_WORDS


def test_core_names_no_engine() -> None:
    """Formats of traces are named, and routers whose protocol is spoken; no engine decides anything in core."""
    engines = re.compile(r"vllm|sglang", re.IGNORECASE)
    for file in (ROOT / "core").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare | ast.Dict | ast.Match):
                texts = [
                    one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)
                ]
                assert not any(engines.search(text) for text in texts), (file, texts)


def test_what_decodes_a_class_is_made_as_its_module_is_imported() -> None:
    """Two threads that make it at once end the process, see `profdeck.base.json_files.JsonKind`."""
    harmless = {
        ("json_files.py", "__init__"),
        ("kineto_events.py", "_decoder"),  # which its module calls
        ("stated_shapes.py", "_leniently"),  # of a class that its module has decoded
        ("substitution.py", "__init__"),  # of classes that nobody else has
    }
    made = [
        f"{file.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)}"
        for file in CODE
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        if (file.name, function.name) not in harmless
        for call in ast.walk(function)
        if isinstance(call, ast.Call)
        if (name := ast.unparse(call.func)) in {"JsonKind", "msgspec.convert"}
        or re.fullmatch(r"msgspec\.\w+\.Decoder", name)
        or (re.fullmatch(r"msgspec\.\w+\.decode", name) and any(word.arg == "type" for word in call.keywords))
    ]
    assert not made


def test_the_english_of_docstrings_and_messages_is_plain() -> None:
    found = {}
    for file in CODE:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                text = " ".join(node.value.split())
                found |= {f"{file.name}:{node.lineno}": match[0] for word in BANNED if (match := re.search(word, text))}
    assert found == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_english_is_plain(page: Path) -> None:
    text = _CODE.sub("", page.read_text(encoding="utf-8"))
    found = {pattern: match[0] for pattern in BANNED if (match := re.search(pattern, text, re.IGNORECASE))}
    assert {match: f"write: {BANNED[pattern]}" for pattern, match in found.items()} == {}
