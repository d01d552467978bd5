"""Where a program decides by the words of a sentence: found in the syntax tree of its source.

A sentence is for people. Code that looks into one breaks when it is reworded, so what is decided is decided by codes
and facts (`springtide.core.reasons`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

# What attributes, variables and JSON fields are called that hold a sentence for people.
SENTENCES = frozenset(
    {"reason", "message", "sentence", "why", "note", "refusal", "explanation", "outcome_reason", "msg", "mend"}
)
# They hold sentences at times, and input that is parsed at others: there only whole words give a sentence away.
TEXTS = frozenset({"text", "told", "said", "detail", "title", "evidence"})
ERRORS = frozenset({"error", "exception", "exc", "err", "failure", "problem"})
# Methods that return the same sentence, changed a little.
_SAME = frozenset({"lower", "upper", "casefold", "strip", "lstrip", "rstrip", "capitalize", "decode"})
# Methods that look into a string, and functions of `re` that do; fullmatch asks for the whole, as == does.
_LOOKING_IN = frozenset(
    {
        *("startswith", "endswith", "partition", "rpartition", "split", "rsplit", "replace"),
        *("removeprefix", "removesuffix", "find", "rfind", "index", "rindex", "count"),
    }
)
_LOOKING_BY_PATTERN = frozenset({"match", "search", "findall", "finditer", "sub", "subn", "split"})
# Parts of names, addresses and digests are no words.
_TWO_WORDS = re.compile(r"(?<![\w./-])[A-Za-z]{2,}[,;:]? [A-Za-z]{2,}(?![\w/-])")
_WORD = re.compile(r"(?<![\w/-])[a-z]{3,}(?![\w/-])")
# A dot is in numbers and names, too.
_BETWEEN_WORDS = re.compile(r"[ ;:,()]|\. ")
_NO_PROSE_OF_A_PATTERN = re.compile(r"\\.|\[[^\]]*\]|\(\?P?<\w+>|\(\?[a-z:=!]|[?*+]|\{[\d,]*\}")


class Reading(NamedTuple):
    """One place where a sentence is looked into: the function or class around it, the line, and the expression."""

    inside: str
    line: int
    expression: str


def constants_of(trees: Iterable[ast.Module]) -> dict[str, ast.expr]:
    """The values of all names in capitals that modules assign, to be looked up where another module compares with one.

    A name that several modules have with different values stands for the last; the values are only looked at for prose.
    """
    return {
        target.id: node.value
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and target.id.isupper()
    }


def sentences_read(tree: ast.Module, constants: Mapping[str, ast.expr]) -> list[Reading]:
    """Every place in a module where code depends on the words of a sentence."""
    reader = _Reader({**constants, **constants_of([tree])})
    reader.visit(tree)
    return sorted(reader.found, key=lambda reading: reading.line)


class _Reader(ast.NodeVisitor):
    def __init__(self, constants: Mapping[str, ast.expr]) -> None:
        self.found: list[Reading] = []
        self._constants = constants
        self._inside: list[str] = []
        # Names of the function around that hold a sentence, and those that hold an error.
        self._sentences: set[str] = set()
        self._errors: set[str] = set()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._inside.append(node.name)
        self.generic_visit(node)
        self._inside.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        before = self._sentences, self._errors
        self._sentences, self._errors = set(self._sentences), set(self._errors)
        self._inside.append(node.name)
        self.generic_visit(node)
        self._inside.pop()
        self._sentences, self._errors = before

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name:
            self._errors.add(node.name)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            if isinstance(target, ast.Name):
                (self._sentences.add if self._is_sentence(node.value) else self._sentences.discard)(target.id)

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = [node.left, *node.comparators]
        for left, operator, right in zip(sides, node.ops, sides[1:], strict=False):
            if isinstance(operator, ast.In | ast.NotIn) and self._is_held(right):
                is_read = self._is_word_of(right, self._strings(left))
            else:
                # Equal to a sentence, or one of several.
                is_read = any(_TWO_WORDS.search(text) for side in (left, right) for text in self._strings(side))
            if is_read:
                self._note(node)
        self.generic_visit(node)

    def visit_Match(self, node: ast.Match) -> None:
        patterns = [each for case in node.cases for each in ast.walk(case.pattern) if isinstance(each, ast.MatchValue)]
        for pattern in patterns:
            if any(_TWO_WORDS.search(text) for text in self._strings(pattern.value)):
                self._note(pattern.value)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        if not isinstance(node.func, ast.Attribute):
            return
        owner, method = node.func.value, node.func.attr
        if method in _LOOKING_IN and self._is_held(owner):
            if node.args and self._is_word_of(owner, self._strings(node.args[0])):
                self._note(node)
        elif method in _LOOKING_BY_PATTERN | {"fullmatch"}:
            is_module = isinstance(owner, ast.Name) and owner.id == "re"
            pattern, subjects = (node.args[0], node.args[1:]) if is_module and node.args else (owner, node.args)
            held = [subject for subject in subjects if self._is_held(subject)]
            texts = [_NO_PROSE_OF_A_PATTERN.sub("", text) for text in self._strings(pattern)]
            is_prose = _TWO_WORDS if method == "fullmatch" else _WORD
            if held and any(is_prose.search(text) for text in texts):
                self._note(node)

    def _note(self, node: ast.expr) -> None:
        self.found.append(Reading(".".join(self._inside), node.lineno, ast.unparse(node)))

    def _is_word_of(self, holder: ast.expr, texts: Iterable[str]) -> bool:
        """Whether one of the texts, looked for in this holder, belongs to a sentence."""
        is_sentence = self._is_sentence(holder)
        return any(_WORD.search(text) or (is_sentence and _BETWEEN_WORDS.search(text)) for text in texts)

    def _is_held(self, node: ast.expr) -> bool:
        return self._is_sentence(node) or _name_of(_unchanged(node)) in TEXTS

    def _is_sentence(self, node: ast.expr) -> bool:
        """Whether an expression is a sentence, or a part of one that was cut off."""
        node = _unchanged(node)
        name = _name_of(node)
        if name:
            is_local = isinstance(node, ast.Name) and (name in self._sentences or name in ERRORS)
            return name in SENTENCES or is_local
        match node:
            case ast.Call(func=ast.Name(id="str" | "repr"), args=[value]):
                return self._is_error(value)
            case ast.Call(func=ast.Attribute(value=value, attr=method)) if method in _LOOKING_IN:
                return self._is_sentence(value)
            case ast.Call(func=ast.Attribute(attr="text")):
                # A code with facts, as a sentence.
                return True
            case ast.Subscript(value=value, slice=ast.Constant() | ast.Slice()):
                return self._is_sentence(value)
        return False

    def _is_error(self, node: ast.expr) -> bool:
        return _name_of(node) in ERRORS or (isinstance(node, ast.Name) and node.id in self._errors)

    def _strings(self, node: ast.expr) -> Iterator[str]:
        """The string literals that an expression consists of; names in capitals stand for their values."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.Name) and node.id in self._constants:
            yield from self._strings(self._constants[node.id])
        elif isinstance(node, ast.JoinedStr):
            yield from (part.value for part in node.values if isinstance(part, ast.Constant))
        elif isinstance(node, ast.Tuple | ast.List | ast.Set):
            for element in node.elts:
                yield from self._strings(element)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            yield from (*self._strings(node.left), *self._strings(node.right))
        elif isinstance(node, ast.Call) and _called(node) in ("compile", "frozenset", "set", "escape"):
            for argument in node.args[:1]:
                yield from self._strings(argument)


def _unchanged(node: ast.expr) -> ast.expr:
    """The expression without methods that leave its words as they are."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SAME:
        node = node.func.value
    return node


def _called(node: ast.Call) -> str:
    return _name_of(node.func)


def _name_of(node: ast.expr) -> str:
    """What a variable, an attribute or a field of a JSON object is called."""
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            return node.attr
        case ast.Subscript(slice=ast.Constant(value=str(field))):
            return field
        case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=str(field)), *_]):
            return field
    return ""
