"""As much of Go's templates, with the functions that Helm adds, as this repository's chart uses; all else is refused.

Written from the documentation of text/template and sprig, and compared with both. It lets the chart be tested without a
toolchain; a template that leaves this subset fails here, with the place.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from springtide.backends.kubernetes.yaml_text import read_yaml, write_yaml

_ACTION = re.compile(r"\{\{(- )?\s*(.*?)\s*( -)?\}\}", re.DOTALL)
_COMMENT = re.compile(r"/\*.*\*/", re.DOTALL)
_TOKEN = re.compile(
    r"""(?P<string>"(?:[^"\\]|\\.)*")|(?P<number>-?\d+)|(?P<field>(?:\$\w*)?(?:\.\w+)+)|(?P<variable>\$\w*)|(?P<dot>\.)"""
    r"""|(?P<word>\w+)|(?P<sign>:=|=|\||\(|\)|,)|(?P<space>\s+)"""
)


class TemplateError(Exception):
    """The template cannot be read, leaves the subset, or calls `fail`."""


class Action(NamedTuple):
    words: str
    line: int


class Node(NamedTuple):
    """A part of a template: kind text, print, assign, if, range; what it says; what it holds; what it holds else."""

    kind: str
    words: str
    body: list[Node]
    other: list[Node]


class Templates:
    """The templates of one chart."""

    def __init__(self, folder: Path) -> None:
        self._defined: dict[str, list[Node]] = {}
        self._files: dict[str, list[Node]] = {}
        for path in sorted(folder.iterdir()):
            parts = list(_parts(path.read_text(encoding="utf-8")))
            nodes, rest = self._parse(parts, path.name)
            if rest:
                raise TemplateError(f"{path.name}: an {rest[0]} too many")
            self._files[path.name] = nodes

    def run(self, name: str, data: dict[str, Any]) -> str:
        """The text that a file becomes. Raises TemplateError."""
        return _Run(self._defined).text(self._files[name], data, {"$": data})

    def names(self) -> list[str]:
        """The files, but for those that only define."""
        return [name for name in self._files if not name.startswith("_")]

    def _parse(self, parts: list[str | Action], place: str) -> tuple[list[Node], list[str | Action]]:
        """Nodes up to the `else` or `end` that ends them, and the parts from there on."""
        nodes: list[Node] = []
        while parts:
            part = parts[0]
            if isinstance(part, str):
                nodes.append(Node("text", part, [], []))
                parts = parts[1:]
                continue
            word, _, rest = part.words.partition(" ")
            if word in ("end", "else"):
                return nodes, parts
            parts = parts[1:]
            if word in ("if", "range", "define"):
                body, other, parts = self._block(parts, place)
                if word == "define":
                    self._defined[json.loads(rest)] = body
                else:
                    nodes.append(Node(word, rest, body, other))
            elif word in ("with", "template", "block", "break", "continue"):
                raise TemplateError(f"{place}:{part.line}: {word} is not in the subset")
            elif re.match(r"\$\w+\s*:?=", part.words):
                nodes.append(Node("assign", part.words, [], []))
            else:
                nodes.append(Node("print", part.words, [], []))
        return nodes, parts

    def _block(self, parts: list[str | Action], place: str) -> tuple[list[Node], list[Node], list[str | Action]]:
        body, parts = self._parse(parts, place)
        if not parts:
            raise TemplateError(f"{place}: an end is missing")
        head = parts[0]
        assert isinstance(head, Action)
        parts = parts[1:]
        if head.words == "end":
            return body, [], parts
        if head.words == "else":
            other, parts = self._parse(parts, place)
            return body, other, parts[1:]
        # `else if` is an if within an else, whose end ends both.
        inner, other, parts = self._block(parts, place)
        return body, [Node("if", head.words.removeprefix("else if "), inner, other)], parts


def _parts(text: str) -> Iterator[str | Action]:
    """Texts and actions in turn; `{{- ` and ` -}}` take the white space beside them away."""
    at, trims = 0, False
    for match in _ACTION.finditer(text):
        before = text[at : match.start()]
        if trims:
            before = before.lstrip()
        if match[1]:
            before = before.rstrip()
        if before:
            yield before
        at, trims = match.end(), bool(match[3])
        words = _COMMENT.sub("", match[2]).strip()
        if words:
            yield Action(" ".join(words.split()) if "\n" in words else words, text.count("\n", 0, match.start()) + 1)
    rest = text[at:].lstrip() if trims else text[at:]
    if rest:
        yield rest


class _Run:
    def __init__(self, defined: dict[str, list[Node]]) -> None:
        self._defined = defined

    def text(self, nodes: list[Node], dot: Any, variables: dict[str, Any]) -> str:
        """Variables that are declared here end here; those of outside may be given another value."""
        scope = _Scope(variables)
        return "".join(self._node(node, dot, scope) for node in nodes)

    def _node(self, node: Node, dot: Any, scope: _Scope) -> str:
        if node.kind == "text":
            return node.words
        if node.kind == "print":
            return _printed(self.value(node.words, dot, scope))
        if node.kind == "assign":
            name, declares, words = re.fullmatch(r"(\$\w+)\s*(:?)=\s*(.*)", node.words, re.DOTALL).groups()  # type: ignore[union-attr]
            scope.put(name, self.value(words, dot, scope), declares=bool(declares))
            return ""
        if node.kind == "if":
            chosen = node.body if _is_true(self.value(node.words, dot, scope)) else node.other
            return self.text(chosen, dot, scope)  # type: ignore[arg-type]
        return self._range(node, dot, scope)

    def _range(self, node: Node, dot: Any, scope: _Scope) -> str:
        match = re.fullmatch(r"(?:(\$\w+)(?:\s*,\s*(\$\w+))?\s*:=\s*)?(.*)", node.words, re.DOTALL)
        assert match is not None
        over = self.value(match[3], dot, scope)
        pairs = sorted(over.items()) if isinstance(over, dict) else list(enumerate(over or ()))
        if not pairs:
            return self.text(node.other, dot, scope)  # type: ignore[arg-type]
        told = []
        for key, member in pairs:
            inner = _Scope(scope)
            if match[2]:
                inner.put(match[1], key, declares=True)
                inner.put(match[2], member, declares=True)
            elif match[1]:
                inner.put(match[1], member, declares=True)
            told.append(self.text(node.body, member, inner))  # type: ignore[arg-type]
        return "".join(told)

    def value(self, words: str, dot: Any, scope: _Scope) -> Any:
        tokens = []
        at = 0
        while at < len(words):
            match = _TOKEN.match(words, at)
            if match is None:
                raise TemplateError(f"{words!r}: what begins with {words[at : at + 10]!r} is not in the subset")
            at = match.end()
            if match.lastgroup != "space":
                # A field that follows a closing bracket at once belongs to what is in the brackets.
                is_joined = match.lastgroup == "field" and match.start() and words[match.start() - 1] == ")"
                tokens.append(("after" if is_joined else match.lastgroup, match[0]))
        value, rest = self._pipeline(tokens, dot, scope)
        if rest:
            raise TemplateError(f"{words!r}: {rest[0][1]!r} too many")
        return value

    def _pipeline(self, tokens: list[Any], dot: Any, scope: _Scope) -> tuple[Any, list[Any]]:
        value, tokens = self._command(tokens, dot, scope, [])
        while tokens and tokens[0][1] == "|":
            value, tokens = self._command(tokens[1:], dot, scope, [value])
        return value, tokens

    def _command(self, tokens: list[Any], dot: Any, scope: _Scope, last: list[Any]) -> tuple[Any, list[Any]]:
        function: Callable[..., Any] | None = None
        if tokens and tokens[0][0] == "word" and tokens[0][1] not in ("true", "false", "nil"):
            name = tokens[0][1]
            function = self._include(scope) if name == "include" else FUNCTIONS.get(name)
            if function is None:
                raise TemplateError(f"the function {name} is not in the subset")
            tokens = tokens[1:]
        operands = []
        while tokens and tokens[0][1] not in ("|", ")"):
            operand, tokens = self._operand(tokens, dot, scope)
            operands.append(operand)
        if function is None and operands and callable(operands[0]):
            function = operands.pop(0)
        if function is not None:
            return function(*operands, *last), tokens
        if len(operands) != 1 or last:
            raise TemplateError(f"{operands!r} cannot be called")
        return operands[0], tokens

    def _operand(self, tokens: list[Any], dot: Any, scope: _Scope) -> tuple[Any, list[Any]]:
        (kind, text), rest = tokens[0], tokens[1:]
        if kind == "string":
            return json.loads(text), rest
        if kind == "number":
            return int(text), rest
        if kind == "word":
            return {"true": True, "false": False, "nil": None}[text], rest
        if kind == "dot":
            return dot, rest
        if kind == "variable":
            return scope.get(text), rest
        if kind == "field":
            variable, _, path = text.partition(".")
            return _field(scope.get(variable) if variable else dot, path), rest
        if text != "(":
            raise TemplateError(f"{text!r} is not in the subset")
        value, rest = self._pipeline(rest, dot, scope)
        rest = rest[1:]
        if rest and rest[0][0] == "after":
            return _field(value, rest[0][1][1:]), rest[1:]
        return value, rest

    def _include(self, scope: _Scope) -> Callable[[str, Any], str]:
        def include(name: str, data: Any) -> str:
            if name not in self._defined:
                raise TemplateError(f"there is no template {name!r}")
            return self.text(self._defined[name], data, {"$": data})

        return include


class _Scope(dict[str, Any]):
    """Variables of a block; what is assigned, not declared, is given to the block that declared it."""

    def __init__(self, outer: dict[str, Any]) -> None:
        super().__init__()
        self._outer = outer

    def get(self, name: str, default: Any = None) -> Any:
        if name in self:
            return self[name]
        if isinstance(self._outer, _Scope):
            return self._outer.get(name)
        if name not in self._outer:
            raise TemplateError(f"{name} was never declared")
        return self._outer[name]

    def put(self, name: str, value: Any, *, declares: bool) -> None:
        if declares or name in self:
            self[name] = value
        elif isinstance(self._outer, _Scope):
            self._outer.put(name, value, declares=False)
        else:
            raise TemplateError(f"{name} was never declared")


def _field(value: Any, path: str) -> Any:
    for name in path.split("."):
        if isinstance(value, dict):
            value = value.get(name)
        elif hasattr(value, name):
            value = getattr(value, name)
        else:
            raise TemplateError(f"{value!r} has no field {name}")
    return value


def _is_true(value: Any) -> bool:
    return bool(value)


def _printed(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return "" if value is None else str(value)


def _as_go_has_it(value: Any) -> Any:
    """JSON's numbers are all of one kind: those that are whole are written without a point."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _as_go_has_it(member) for key, member in value.items()}
    return [_as_go_has_it(member) for member in value] if isinstance(value, list) else value


def _to_json(value: Any) -> str:
    text = json.dumps(_as_go_has_it(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _from_json(text: str) -> dict[str, Any]:
    value = json.loads(text)
    assert isinstance(value, dict), "Helm's fromJson reads objects only"
    return value


def _from_yaml(text: str) -> dict[str, Any]:
    value = read_yaml(text, "fromYaml")[0]
    assert isinstance(value, dict), "Helm's fromYaml reads objects only"
    return value


def _fail(sentence: str) -> str:
    raise TemplateError(sentence)


def _set(table: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    table[key] = value
    return table


def _indent(width: int, text: str) -> str:
    return "\n".join(" " * width + line for line in text.split("\n"))


def _kind(value: Any) -> str:
    kinds = {
        dict: "map",
        list: "slice",
        str: "string",
        bool: "bool",
        int: "float64",
        float: "float64",
        type(None): "invalid",
    }
    return kinds[type(value)]


def _all(*values: Any) -> Any:
    """The first that is empty, else the last."""
    return next((value for value in values if not value), values[-1])


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "and": _all,
    "append": lambda members, member: [*members, member],
    "concat": lambda *lists: [member for members in lists for member in members],
    "deepCopy": copy.deepcopy,
    "default": lambda default, value=None: value or default,
    "dict": lambda *pairs: dict(zip(pairs[::2], pairs[1::2], strict=True)),
    "fail": _fail,
    "fromJson": _from_json,
    "fromYaml": _from_yaml,
    "get": lambda table, key: table.get(key, ""),
    "gt": lambda one, other: one > other,
    "hasKey": lambda table, key: key in table,
    "hasPrefix": lambda prefix, text: text.startswith(prefix),
    "int": lambda value: int(value or 0),
    "kindIs": lambda kind, value: _kind(value) == kind,
    "list": lambda *members: list(members),
    "nindent": lambda width, text: "\n" + _indent(width, text),
    "not": lambda value: not value,
    "omit": lambda table, *keys: {key: value for key, value in table.items() if key not in keys},
    "printf": lambda form, *values: form % tuple(map(_printed, values)),
    "quote": lambda value: json.dumps(_printed(value), ensure_ascii=False),
    "set": _set,
    "sha256sum": lambda text: hashlib.sha256(text.encode()).hexdigest(),
    "toJson": _to_json,
    "toYaml": lambda value: write_yaml([_as_go_has_it(value)], sorts_keys=True).removeprefix("---\n").rstrip("\n"),
    "trimSuffix": lambda suffix, text: text.removesuffix(suffix),
}
