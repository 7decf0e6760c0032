"""Converts plain data, such as a parsed config, to instances of attrs classes and back.

Values are never coerced: ``"false"`` is not a bool, ``2.9`` is not an int and ``"cuda"`` is not a list. All errors
are reported together, each with the path of its key.
"""

from __future__ import annotations

import functools
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import attrs

from profdeck_traces.base.documents import shortened, show
from profdeck_traces.base.errors import ConfigError, did_you_mean
from profdeck_traces.base.files import user_path

T = TypeVar("T")

_LARGEST = 2**63 - 1
_LONGEST_S = 365 * 86_400.0


class _InvalidValueError(ValueError):
    """A value is invalid. The caller adds the value's path to the message."""


def structure(data: Any, cls: type[T], *, where: str, unsupported: Collection[str] = ()) -> T:
    """Convert plain data to an instance of ``cls``.

    Args:
        data: mappings, lists and scalars, as parsed from YAML, TOML or JSON.
        cls: an attrs class.
        where: the path of ``data`` in the config, such as ``roles.trainer.options``; empty for the complete config.
        unsupported: fields of ``cls`` to omit from the allowed keys in error messages.

    Raises:
        ConfigError: lists all invalid keys and values, with their paths and the allowed values.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where or 'The config'}: expected a mapping of keys to values, got {show(data)}.")
    walk = _Walk(unsupported)
    built: T = walk.convert(data, cls, where)
    if walk.errors:
        raise ConfigError(*walk.errors)
    return built


OMIT_IF_NONE: Mapping[Any, Any] = {"profdeck": "omit if None"}
"""Metadata for fields that `unstructure` omits if they are None, because older readers reject unknown keys."""


_PLAIN = frozenset({str, int, float, bool})


def unstructure(value: Any) -> Any:
    """Convert attrs instances, enum members, paths and tuples to plain JSON data."""
    if value is None or type(value) in _PLAIN:
        return value
    if isinstance(value, Enum | Path):
        return value.value if isinstance(value, Enum) else str(value)
    if isinstance(value, list | tuple):
        return [unstructure(item) for item in value]
    if _is_from_list(value):
        return value.to_list()
    if attrs.has(type(value)):
        value = {
            field.name: item
            for field in attrs.fields(type(value))
            if (item := getattr(value, field.name)) is not None or field.metadata != OMIT_IF_NONE
        }
    if isinstance(value, Mapping):
        return {unstructure(key): unstructure(item) for key, item in value.items()}
    return value


def duration_validator(minimum: Any) -> Any:
    """Return a validator for a duration in seconds, of at most one year.

    Args:
        minimum: a validator that checks the minimum.
    """
    return attrs.validators.and_(minimum, attrs.validators.le(_LONGEST_S))


def expand_path(path: Path | None) -> Path | None:
    """Expand a path from the config with `profdeck_traces.base.files.user_path`.

    Raises:
        ConfigError: the home directory is unknown, or the path contains an environment variable.
    """
    return None if path is None else user_path(path)


class _Walk:
    """Converts plain data recursively, and collects all errors instead of stopping at the first one."""

    def __init__(self, unsupported: Collection[str]) -> None:
        self._unsupported = unsupported
        self.errors: list[str] = []

    def convert(self, data: Any, hint: Any, path: str) -> Any:
        """Convert data to a type. If the data is invalid, add a message to `errors` and return None."""
        try:
            return self._converted(data, hint, path)
        except Exception as error:  # noqa: BLE001  # validators and constructors of plugins raise any type
            message = str(error.args[0] if error.args else error)
            self._add_error(path, message if message.endswith((".", "?")) else f"{message}.")
            return None

    def _add_error(self, path: str, message: str) -> None:
        path = path.lstrip(".")
        self.errors.append(f"{path}: {message}" if path else message)

    def _converted(self, data: Any, hint: Any, path: str) -> Any:  # noqa: PLR0911 - one branch per kind of type
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if hint is Any:
            return data
        if hint in _VALUES:
            return _VALUES[hint](data)
        if origin in {types.UnionType, typing.Union}:
            return self._union(data, hint, path)
        if origin is typing.Literal:
            return _literal(data, arguments)
        if origin in {tuple, list, Sequence}:
            items = [self.convert(item, arguments[0], f"{path}[{index}]") for index, item in enumerate(_list(data))]
            return tuple(items) if origin is tuple else items
        if origin in {dict, Mapping} or hint in {dict, Mapping}:
            return self._mapping(data, arguments or (Any, Any), path)
        if _is_from_list(hint):
            return hint.from_list(_list(data))
        if isinstance(hint, type) and issubclass(hint, Enum):
            return _enum(data, hint)
        if attrs.has(hint):
            return self._class(data, hint, path)
        raise _InvalidValueError(f"the type {hint} of this key is not supported.")

    def _union(self, data: Any, hint: Any, path: str) -> Any:
        """Convert data to a union type: ``X | None``, ``bool | str`` or ``str | tuple[X, ...]``."""
        members = typing.get_args(hint)
        if data is None and types.NoneType in members:
            return None
        types_ = set(members) - {types.NoneType}
        if types_ == {bool, str}:
            return _switch_or_name(data)
        if str in types_ and len(types_) > 1:
            types_.remove(str)
            if tuple[int, ...] in types_:
                data = _expand_ranges(data)
            if isinstance(data, str):
                return data
        if len(types_) > 1:
            raise _InvalidValueError(f"the type {hint} of this key is not supported.")
        return self._converted(data, types_.pop(), path)

    def _mapping(self, data: Any, hints: tuple[Any, ...], path: str) -> dict[Any, Any]:
        if not isinstance(data, Mapping):
            raise _InvalidValueError("expected a mapping of keys to values.")
        key_type, value_type = hints
        converted = {}
        for key, value in data.items():
            key_path = f"{path}.{repr(key)[1:-1]}" if isinstance(key, str) else f"{path}[{key!r}]"
            converted[self.convert(key, key_type, key_path)] = self.convert(value, value_type, key_path)
        return converted

    def _class(self, data: Any, cls: type, path: str) -> Any:
        fields, count = _fields(cls), len(self.errors)
        if not isinstance(data, Mapping):
            raise _InvalidValueError(f"expected a mapping, got {show(data)}. Allowed keys: {', '.join(fields)}.")
        arguments: dict[str, Any] = {}
        for key, (field, hint) in fields.items():
            if key in data:
                arguments[str(field.alias)] = self.convert(data[key], hint, f"{path}.{key}")
            elif field.default is attrs.NOTHING:
                self._add_error(f"{path}.{key}", "this key is required.")
        if unknown := sorted(str(key) for key in data if key not in fields):
            allowed = [key for key in fields if key not in self._unsupported]
            self._add_error(path, " ".join(_unknown_key(key, allowed) for key in unknown))
        # A validator can compare several fields, so validators run only if all fields are valid.
        return cls(**arguments) if len(self.errors) == count else None


@functools.cache
def _fields(cls: type) -> Mapping[str, tuple[attrs.Attribute[Any], Any]]:
    """Return the fields of an attrs class and their types, by field name."""
    hints = typing.get_type_hints(cls)
    return {field.name: (field, hints[field.name]) for field in attrs.fields(cls) if field.init}


def _exactly(cls: type, expected: str, value: Any) -> Any:
    if type(value) is not cls:  # isinstance would accept a bool as an int
        raise _InvalidValueError(f"expected {expected}, got {show(value)}.{_type_hint(value, cls)}")
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise _InvalidValueError(f"expected an integer from {-_LARGEST:,} to {_LARGEST:,}, got {show(value)}.")
    if isinstance(value, str) and (bad := _UNUSABLE.search(value)):
        raise _InvalidValueError(f"expected {expected}, got {show(value)}: it contains the character {bad[0]!r}.")
    return value


def _literal(value: Any, allowed: tuple[Any, ...]) -> Any:
    if not any(value == item and type(value) is type(item) for item in allowed):
        texts = [item for item in allowed if isinstance(item, str)]
        hint = did_you_mean(value, texts) if isinstance(value, str) else ""
        raise _InvalidValueError(f"expected {' or '.join(map(repr, allowed))}, got {show(value)}.{hint}")
    return value


def _switch_or_name(value: Any) -> bool | str:
    switch = isinstance(value, str) and value.lower() in {*_TRUE, *_TRUE.values()}
    if not isinstance(value, bool) and (switch or not isinstance(value, str) or not _PLUGIN.fullmatch(value)):
        raise _InvalidValueError(f"expected true, false or a name, got {show(value)}.{_type_hint(value, bool)}")
    return value


_PLUGIN = re.compile(r"[A-Za-z][\w-]*", re.ASCII)
_UNUSABLE = re.compile("[\0\ud800-\udfff]")
"""Characters that paths, environment variables and UTF-8 files cannot contain: NUL and surrogates."""
_TRUE = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


def _type_hint(value: Any, cls: type) -> str:
    """Return a hint if the value is a bool or an integer written as a string."""
    if not isinstance(value, str):
        return ""
    if cls is bool and value.lower() in _TRUE:
        return f" Write {_TRUE[value.lower()]}."
    fits = (cls is bool and value.lower() in {"true", "false"}) or (cls is int and value.lstrip("+-").isdecimal())
    return " Remove the quotes." if fits else ""


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _InvalidValueError(f"expected a number, got {show(value)}.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _InvalidValueError(f"expected a finite number, got {show(value)}.")
    return number


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise _InvalidValueError(f"expected a list, got {show(value)}. Write it in brackets: [{value}].")
    return list(value)


def _is_from_list(cls: Any) -> bool:
    """Return whether a class defines ``from_list`` and ``to_list``, as `profdeck.config.schedule.Schedule` does."""
    return hasattr(cls, "from_list")


def _enum(value: Any, cls: type[Enum]) -> Enum:
    allowed = [str(member.value) for member in cls]
    if value not in allowed:
        hint = _alias_hint(value, cls) or did_you_mean(value, allowed) if isinstance(value, str) else ""
        raise _InvalidValueError(f"expected one of {', '.join(allowed)}, got {show(value)}.{hint}")
    return cls(value)


_VALUES: Mapping[Any, Callable[[Any], Any]] = {
    bool: functools.partial(_exactly, bool, "true or false"),
    int: functools.partial(_exactly, int, "an integer"),
    str: functools.partial(_exactly, str, "text"),
    float: _number,
    Path: lambda value: user_path(_exactly(str, "a path", value)),
}
"""Conversions of single values, by type."""


def _alias_hint(text: str, cls: type[Enum]) -> str:
    """Return a hint if a text is an alias of an allowed value.

    Classes such as `profdeck.config.options.Activity` define aliases in the class method ``from_alias``.
    """
    member = cls.from_alias(text) if hasattr(cls, "from_alias") else None
    return f" Did you mean '{member.value}'?" if member is not None else ""


_KEYS_OF_OTHER_TOOLS = {
    "all_ranks": "ranks: all",
    "contents": "options.activities, options.record_shapes, options.with_stack or options.profile_memory",
    "discrete": "mode: discrete",
    "num_steps": "steps, or iterations.count for an engine",
    "profile_continuous_steps": "mode: continuous",
    "profile_ranks": "ranks",
    "profile_steps": "steps",
    "save_path": "output",
    "step_end": "steps, such as '3..5'",
    "step_start": "steps, such as '3..5'",
    "tool": "backend",
}
"""Maps keys of other tools to the corresponding keys of profdeck."""


_RENAMED = {"stages": "batch_kinds"}
"""Maps old names of request keys to their new names."""
_REMOVED = {"budget_gb": "Set 'sample' to limit the number of targets that record."}
"""Maps removed request keys to messages that describe the replacement."""


def _unknown_key(key: str, allowed: list[str]) -> str:
    return f"unknown key '{shortened(key)}'.{_replacement_hint(key, allowed)} Allowed: {', '.join(allowed)}."


def _replacement_hint(key: str, allowed: list[str]) -> str:
    if (renamed := _RENAMED.get(key)) in allowed:
        return f" It was renamed to '{renamed}'."
    if key in _REMOVED:
        return f" It was removed. {_REMOVED[key]}"
    if key in _KEYS_OF_OTHER_TOOLS:
        return f" Use {_KEYS_OF_OTHER_TOOLS[key]}."
    return did_you_mean(key, allowed)


_RANGE = re.compile(r"\s*(\d{1,7})\s*\.\.\s*(\d{1,7})\s*", re.ASCII)


def _expand_ranges(value: Any) -> Any:
    """Expand ranges such as ``0..7``, alone or in a list, to integers. Return other values unchanged."""
    expanded: list[Any] = []
    for item in [value] if isinstance(value, str) else value if isinstance(value, list | tuple) else ():
        match = _RANGE.fullmatch(item) if isinstance(item, str) else None
        if match is None:
            expanded.append(item)
            continue
        first, last = map(int, match.groups())
        if last < first:
            raise _InvalidValueError(f"the range {item!r} is empty, because its end is less than its start.")
        expanded += range(first, last + 1)
    return value if not expanded or expanded == [value] else expanded
