"""Options of all backends, and documentation and JSON Schema for option classes.

A backend defines its options as a frozen attrs class that extends `CommonOptions`. The docstring below each field
contains its meaning, default and cost. The command line and the reference print these docstrings.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import textwrap
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum, StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

import attrs
from attrs import validators

from profdeck.config.structuring import duration_validator, unstructure


class Activity(StrEnum):
    """Kind of activity to record."""

    CPU = "cpu"
    CUDA = "cuda"
    NPU = "npu"

    @classmethod
    def from_alias(cls, text: str) -> Activity | None:
        """Return the activity with an alias from other tools, if any."""
        return cls.CUDA if text.lower() == "gpu" else None


@attrs.frozen(kw_only=True)
class CommonOptions:
    """Options with the same meaning in all backends."""

    activities: tuple[Activity, ...] | None = None
    """Activities to record. Default: the CPU and the available device. If a selected device is not available, the start
    of the job fails."""

    record_shapes: bool = False
    """Record the input shapes of operators. Default: off. Increases the size of traces, with a small cost per operator.
    """

    with_stack: bool = False
    """Record Python call stacks. Default: off. Traces are about ten times as large, and each step is slower."""

    profile_memory: bool = False
    """Record tensor allocations and deallocations as events. Default: off."""

    with_flops: bool = False
    """Estimate the FLOPs of matrix multiplications and convolutions from their shapes. Default: off."""

    with_modules: bool = False
    """Record the module hierarchy of operators (TorchScript modules only, in PyTorch). Default: off."""

    max_capture_s: float = attrs.field(default=1800.0, validator=duration_validator(validators.gt(0.0)))
    """Maximum duration of one capture, in seconds. Default: 1800. A longer capture is stopped, its trace is kept and
    marked partial, and the job continues. In engines, the capture ends at the next iteration or command."""

    max_capture_steps: int = attrs.field(default=1000, validator=validators.ge(1))
    """Maximum number of global steps in one capture. Default: 1000. At the limit, the capture is stopped as for
    `max_capture_s`, and the remaining adjacent steps are skipped. Iterations of an engine are not steps: without a job,
    only the other limits apply to its captures."""

    max_memory_share: float = attrs.field(
        default=0.05, validator=validators.and_(validators.gt(0.0), validators.le(1.0))
    )
    """Maximum growth of a process's memory usage during a capture, as a share of the memory that is still free on the
    host, in the cgroup and under RLIMIT_AS. Default: 0.05, because torch needs about nine times the memory of the
    recording to write the trace. At the limit, the capture is stopped as for `max_capture_s`."""


COMMON_OPTIONS = frozenset(field.name for field in attrs.fields(CommonOptions))
"""Names of all common options."""
LIMITS = frozenset({"max_capture_s", "max_capture_steps", "max_memory_share"})
"""Names of the common options that every backend supports."""


@attrs.frozen
class OptionDoc:
    """Documentation of one option."""

    name: str
    type: str
    default: str
    text: str
    limits: str = ""
    """Limits of the validators, such as ``>= 1``."""


def describe(options: type) -> list[OptionDoc]:
    """Return the documentation of all fields of an options class. Inherited fields come last."""
    texts: dict[str, str] = {}
    for cls in reversed(options.__mro__[:-1]):
        texts.update(_field_docstrings(cls))
    not_inherited = set(inspect.get_annotations(options))
    fields = sorted(attrs.fields(options), key=lambda field: field.name not in not_inherited)
    return [
        OptionDoc(
            name=field.name,
            type=_type_name(field.type),
            default=_default_text(field.default),
            text=" ".join(texts.get(field.name, "").split()),
            limits=", ".join(f"{operator} {limit}" for operator, limit in _limits(field.validator)),
        )
        for field in fields
    ]


def json_schema(options: type, title: str, *, omitted: Collection[str] = ()) -> dict[str, Any]:
    """Return the JSON Schema of an options class.

    Args:
        options: the class.
        title: the title of the schema.
        omitted: names of fields to omit from the schema.
    """
    schema = _schema_of_class(options, omitted)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, **schema}


def _schema_of_class(options: type, omitted: Collection[str] = ()) -> dict[str, Any]:
    hints, texts = typing.get_type_hints(options), {doc.name: doc.text for doc in describe(options)}
    properties, required = {}, []
    for field in attrs.fields(options):
        if field.name in omitted:
            continue
        schema = _schema_of_type(hints[field.name])
        for operator, limit in _limits(field.validator):
            keyword = _LIMIT_KEYWORDS[operator]
            schema[keyword.format("Items" if schema.get("type") == "array" else "Length")] = limit
        if texts[field.name]:
            schema["description"] = texts[field.name].replace("``", "`")
        if field.default is attrs.NOTHING:
            required.append(field.name)
        else:
            factory = getattr(field.default, "factory", None)
            schema["default"] = unstructure(factory() if factory else field.default)
        properties[field.name] = schema
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


_LIMIT_KEYWORDS = {
    ">=": "minimum",
    ">": "exclusiveMinimum",
    "<=": "maximum",
    "<": "exclusiveMaximum",
    "length >=": "min{}",
    "length <=": "max{}",
}


def _limits(validator: Any) -> Iterator[tuple[str, Any]]:
    """Yield the operators and limits of validators for numbers and lengths. Other validators are ignored."""
    match validator:
        case object(exc_types=_):  # not_ inverts its validator
            return
        case object(_validators=parts):  # and_
            for part in parts:
                yield from _limits(part)
        case object(validator=inner):  # optional
            yield from _limits(inner)
        case object(compare_op=operator, bound=limit):
            yield operator, limit
        case object(min_length=limit):
            yield "length >=", limit
        case object(max_length=limit):
            yield "length <=", limit


_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", Path: "string", NoneType: "null"}


def _schema_of_type(hint: Any) -> dict[str, Any]:  # noqa: PLR0911 - one branch per kind of type
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in {UnionType, typing.Union}:
        return {"anyOf": [_schema_of_type(argument) for argument in arguments]}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in {tuple, list, Sequence}:
        return {"type": "array", "items": _schema_of_type(arguments[0])}
    if origin is Mapping or hint in {dict, Mapping}:
        return {"type": "object"}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return {"enum": [unstructure(member) for member in hint]}
    if isinstance(hint, type) and attrs.has(hint):
        return _schema_of_class(hint)
    return {"type": _JSON_TYPES[hint]} if hint in _JSON_TYPES else {}


def _field_docstrings(cls: type) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):  # no source code, as in a frozen or interactive program
        return {}
    body = tree.body[0].body  # type: ignore[attr-defined]  # the source of a class is one ClassDef
    return {
        field.target.id: text.value.value
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def _type_name(annotation: Any) -> str:
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", text)  # remove the modules of class names


def _default_text(default: Any) -> str:
    if default is attrs.NOTHING:
        return "required"
    if isinstance(default, bool):
        return str(default).lower()
    if hasattr(default, "factory"):  # attrs.Factory; type checkers treat it as a function
        default = default.factory()
    if isinstance(default, tuple):
        return f"[{', '.join(map(str, default))}]"
    return "automatic" if default is None else str(default)
