"""Recipes for the diagnosis benchmark: planted causes with their expected diagnoses, and clean controls."""

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
"""Comment that marks the source line of a planted cause."""


class Kind(StrEnum):
    """Kind of recording."""

    JOB = "job"
    """A training process on the CPU."""
    RANKS = "ranks"
    """Ranks on the CPU, started by torchrun."""
    AGENT = "agent"
    """A job on the CPU that generates tokens, calls tools and trains."""
    GPU = "gpu"
    """Generated GPU traces."""
    VLLM = "vllm"
    """A vLLM server on the CPU."""
    SGLANG = "sglang"
    """An SGLang server on the CPU."""
    DIFF = "diff"
    """Two recordings for ``profdeck diff``, one with the cause and one without."""
    TREND = "trend"
    """Captures of one job for ``profdeck trend``. Only the later captures contain the cause."""


@attrs.frozen(kw_only=True)
class Answer:
    """Expected diagnosis of a planted cause."""

    rules: tuple[str, ...]
    """Names of the rules that identify the cause correctly."""
    cure: tuple[str, ...]
    """Regular expressions. The advice must match at least one of them, ignoring case."""


@attrs.frozen(kw_only=True)
class Lines:
    """Source lines of a planted cause: those of the innermost function that contains the marker."""

    file: str
    first: int
    last: int


@attrs.frozen(kw_only=True)
class Recipe:
    """Definition of one recording in the benchmark."""

    id: str
    kind: Kind
    answer: Answer | None
    """Expected diagnosis. None for a clean control."""
    plant: Callable[..., Any]
    """Function that plants the cause. The type of its argument depends on ``kind``."""
    options: Mapping[str, Any] = attrs.field(factory=dict)
    """Kind-specific options, such as the number of ranks."""
    tolerates: tuple[str, ...] = ()
    """Rules that may report a finding on this control, because the finding is true."""

    @property
    def source(self) -> str:
        """Source code of the function, without the decorator that declares the answer."""
        source = inspect.getsource(self.plant)
        return source[source.index("def ") :]

    def lines(self) -> Lines | None:
        """Return the source lines of the planted cause, or None if no line has the marker."""
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
        """Return the random number generator for the sizes and names in this recipe."""
        return random.Random(zlib.crc32(self.id.encode()) + seed)


@attrs.frozen(kw_only=True)
class Truth:
    """Ground truth for one recording. The values depend on the seed and the machine."""

    cost_us: float | None
    """Time that the cause adds to the mean step time. None for a control."""
    step_us: float
    """Mean step time."""
    places: tuple[str, ...] = ()
    """Substrings that identify a correct location, such as the stage name. Empty if only one location is possible."""
    lines: Lines | None = None
    """Source lines of the cause at recording time. None if there is no marker or stacks were not recorded."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-compatible values."""
        return attrs.asdict(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Truth:
        """Create a truth from the output of `to_dict`."""
        lines = document["lines"] and Lines(**document["lines"])
        return cls(**{**document, "places": tuple(document["places"]), "lines": lines})


@attrs.define(eq=False)
class Recipes:
    """Registry of the recipes of one kind, by id."""

    kind: Kind
    by_id: dict[str, Recipe] = attrs.field(factory=dict)

    def planted(
        self, name: str, *, rules: str, cure: str, **options: Any
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register a function that plants a cause.

        Args:
            name: id of the recipe within its kind.
            rules: names of the correct rules, separated by spaces.
            cure: alternative patterns for the correct advice, separated by " | ".
            options: kind-specific options.
        """
        answer = Answer(rules=tuple(rules.split()), cure=tuple(cure.split(" | ")))
        return self._register(name, answer, options)

    def control(
        self, name: str, *, tolerates: str = "", **options: Any
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register a clean control.

        Args:
            name: id of the recipe within its kind.
            tolerates: rules that may report a finding, separated by spaces.
            options: kind-specific options.
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
