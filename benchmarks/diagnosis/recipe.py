"""Recipes of the diagnosis benchmark: planted causes with the expected diagnosis, and clean controls."""

from __future__ import annotations

import ast
import inspect
import random
import zlib
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import attrs

MARKER = "# planted"
"""Comment on the source line of a planted cause."""


class Kind(StrEnum):
    """Kind of recording."""

    JOB = "job"
    """A training process on the CPU."""
    RANKS = "ranks"
    """Ranks on the CPU, started by torchrun."""
    AGENT = "agent"
    """A job that generates, calls tools and trains, on the CPU."""
    GPU = "gpu"
    """Generated traces of GPUs."""
    VLLM = "vllm"
    """A vLLM server on the CPU."""
    SGLANG = "sglang"
    """An SGLang server on the CPU."""
    DIFF = "diff"
    """Two recordings, one of them with the cause, for ``profdeck diff``."""
    TREND = "trend"
    """Captures of one job, the later ones with the cause, for ``profdeck trend``."""


@attrs.frozen(kw_only=True)
class Answer:
    """Expected diagnosis of a planted cause."""

    rules: tuple[str, ...]
    """Names of the rules that name the cause correctly."""
    cure: tuple[str, ...]
    """Regular expressions. The advice must match one of them, ignoring case."""


@attrs.frozen(kw_only=True)
class Lines:
    """Source lines that locate a planted cause: the innermost function around the marker."""

    file: str
    first: int
    last: int


@attrs.frozen(kw_only=True)
class Recipe:
    """One recording of the benchmark."""

    id: str
    kind: Kind
    answer: Answer | None
    """None for a clean control."""
    plant: Callable[..., Any]
    """Function that plants the cause. Its argument depends on the kind."""
    options: Mapping[str, Any] = attrs.field(factory=dict)
    """Options of the kind, such as the number of ranks."""
    tolerates: tuple[str, ...] = ()
    """Rules that may report something on this control, because their statement is true."""

    @property
    def source(self) -> str:
        """Source code of the function, without the decorator that declares the answer."""
        source = inspect.getsource(self.plant)
        return source[source.index("def ") :]

    def lines(self) -> Lines | None:
        """Return the source lines of the planted cause, or None without a marker."""
        lines, first = inspect.getsourcelines(self.plant)
        marked = [first + index for index, line in enumerate(lines) if line.rstrip().endswith(MARKER)]
        if not marked:
            return None
        path = Path(inspect.getfile(self.plant))
        functions = [
            node
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.FunctionDef) and node.lineno <= marked[0] <= (node.end_lineno or 0)
        ]
        innermost = max(functions, key=lambda node: node.lineno)
        return Lines(file=path.name, first=innermost.lineno, last=innermost.end_lineno or innermost.lineno)

    def generator(self, seed: int) -> random.Random:
        """Return the random generator that draws the sizes and names of this recipe."""
        return random.Random(zlib.crc32(self.id.encode()) + seed)


@attrs.frozen(kw_only=True)
class Truth:
    """Measured values of one recording. They depend on the seed and the machine."""

    cost_us: float | None
    """Time that the cause adds to the mean step. None for a control."""
    step_us: float
    """Mean step."""
    places: tuple[str, ...] = ()
    """Texts of which a correct place contains one, such as the name of the stage. Empty if there is only one place."""
    lines: Lines | None = None
    """Source lines of the cause when it was recorded, if stacks were recorded."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return attrs.asdict(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Truth:
        """Return the truth that `to_dict` wrote."""
        lines = document["lines"] and Lines(**document["lines"])
        return cls(**{**document, "places": tuple(document["places"]), "lines": lines})


@attrs.define(eq=False)
class Recipes:
    """Recipes of one kind, by id."""

    kind: Kind
    by_id: dict[str, Recipe] = attrs.field(factory=dict)

    def planted(
        self, name: str, *, rules: str, cure: str, **options: Any
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register a function that plants a cause.

        Args:
            name: id of the recipe below its kind.
            rules: names of the correct rules, separated by spaces.
            cure: alternatives of the correct advice, separated by " | ".
            options: options of the kind.
        """
        answer = Answer(rules=tuple(rules.split()), cure=tuple(cure.split(" | ")))
        return self._register(name, answer, options)

    def control(
        self, name: str, *, tolerates: str = "", **options: Any
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register a clean control.

        Args:
            name: id of the recipe below its kind.
            tolerates: rules that may report something, separated by spaces.
            options: options of the kind.
        """
        return self._register(name, None, options, tuple(tolerates.split()))

    def _register(
        self, name: str, answer: Answer | None, options: Mapping[str, Any], tolerates: tuple[str, ...] = ()
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def register(plant: Callable[..., Any]) -> Callable[..., Any]:
            identifier = f"{self.kind}/{name}"
            assert identifier not in self.by_id
            self.by_id[identifier] = Recipe(
                id=identifier, kind=self.kind, answer=answer, plant=plant, options=options, tolerates=tolerates
            )
            return plant

        return register
