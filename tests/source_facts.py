"""Extract facts from Python syntax trees, such as signatures, names, literals and the order of calls.

Facts contain no statements. `summarize` shortens assigned values.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from typing import Any

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def summarize(node: ast.AST) -> str:
    """Return an expression as source code. Replace call arguments and complex expressions with ``...``."""
    match node:
        case ast.Constant() | ast.Name():
            return ast.unparse(node)
        case ast.Attribute():
            return f"{summarize(node.value)}.{node.attr}"
        case ast.Call():
            return f"{summarize(node.func)}({'...' if node.args or node.keywords else ''})"
        case ast.List():
            return f"[{', '.join(map(summarize, node.elts))}]"
        case ast.JoinedStr():
            return repr(_template(node))
    return "..."


def _template(node: ast.JoinedStr) -> str:
    parts = []
    for part in node.values:
        if isinstance(part, ast.Constant):
            parts.append(part.value)
        else:
            name = summarize(part.value)
            parts.append("{" + (name if name.replace(".", "").isidentifier() else "") + "}")
    return "".join(parts)


def _parameters(node: ast.FunctionDef) -> list[str]:
    arguments = node.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    if arguments.vararg:
        names.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        names.append("*")
    names += [argument.arg for argument in arguments.kwonlyargs]
    names += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    return [name for name in names if name not in {"self", "cls"}]


def _defaults(node: ast.FunctionDef) -> dict[str, str]:
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    pairs = [*zip(positional[len(positional) - len(arguments.defaults) :], arguments.defaults, strict=True)]
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return {argument.arg: ast.unparse(default) for argument, default in pairs if default is not None}


def _annotations(node: Any) -> dict[str, str]:
    if isinstance(node, ast.ClassDef):
        fields = [(ast.unparse(item.target), item.annotation) for item in node.body if isinstance(item, ast.AnnAssign)]
    else:
        fields = [(item.arg, item.annotation) for item in (*node.args.args, *node.args.kwonlyargs) if item.annotation]
    return {name: ast.unparse(annotation) for name, annotation in fields}


def _assigned(nodes: Any) -> Iterator[tuple[str, str]]:
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield ast.unparse(target), summarize(node.value)
        elif isinstance(node, ast.AugAssign):
            change = ast.AugAssign(ast.Name("_"), node.op, ast.Name(summarize(node.value)))
            yield ast.unparse(node.target), ast.unparse(change).removeprefix("_ ")


@functools.cache
def _walk(node: ast.AST, *kinds: type[ast.AST]) -> list[Any]:
    """Return the nodes of these kinds, sorted by position."""
    nodes = [child for child in ast.walk(node) if isinstance(child, kinds)]
    return sorted(nodes, key=lambda child: (child.lineno, child.col_offset))


def _distinct(pairs: Iterator[tuple[str | None, str]], key: str) -> list[str]:
    return list(dict.fromkeys(value for name, value in pairs if name == key))


@functools.cache
def _calls(node: ast.AST) -> dict[str, int]:
    names = [ast.unparse(call.func) for call in _walk(node, ast.Call)]
    return {name: names.index(name) for name in names}


@functools.cache
def _names(node: ast.AST) -> set[str]:
    return {ast.unparse(child) for child in _walk(node, ast.Name, ast.Attribute)}


@functools.cache
def _literals(node: ast.AST) -> set[str]:
    strings = {child.value for child in _walk(node, ast.Constant) if isinstance(child.value, str)}
    return strings | {_template(child) for child in _walk(node, ast.JoinedStr)}


def _decorated(node: ast.AST) -> Iterator[tuple[str, str]]:
    for child in _walk(node, *DEFINITIONS):
        for decorator in child.decorator_list:
            is_call = isinstance(decorator, ast.Call)
            positional = ast.Call(decorator.func, decorator.args, []) if is_call else decorator
            yield ast.unparse(positional), child.name


FACTS: dict[str, Callable[[Any], Any]] = {
    "bases": lambda node: [ast.unparse(base) for base in node.bases],
    "decorators": lambda node: [ast.unparse(decorator) for decorator in node.decorator_list],
    "is_async": lambda node: isinstance(node, ast.AsyncFunctionDef),
    "parameters": _parameters,
    "defaults": _defaults,
    "field_names": lambda node: list(_annotations(node)),
    "constant_names": lambda node: list(dict(_assigned(node.body))),
    "raises": lambda node: bool(_walk(node, ast.Raise)),
    "attributes_set": lambda node: sorted({name for name, _ in _assigned(ast.walk(node)) if name.startswith("self.")}),
}
KEYED_FACTS: dict[str, Callable[[Any, str], Any]] = {
    "annotations": lambda node, key: _annotations(node).get(key),
    "constants": lambda node, key: dict(_assigned(node.body)).get(key),
    "values": lambda node, key: _distinct(_assigned(_walk(node, ast.Assign, ast.AnnAssign, ast.AugAssign)), key),
    "keywords": lambda node, key: _distinct(
        ((word.arg, summarize(word.value)) for word in _walk(node, ast.keyword)), key
    ),
    "calls": lambda node, key: _calls(node).get(key),
    "names": lambda node, key: key in _names(node),
    "literals": lambda node, key: key in _literals(node),
    "imports": lambda node, key: {
        alias.name: f"{'.' * child.level}{child.module or ''}"
        for child in _walk(node, ast.ImportFrom)
        for alias in child.names
    }.get(key),
    "decorated": lambda node, key: dict(_decorated(node)).get(key),
}
