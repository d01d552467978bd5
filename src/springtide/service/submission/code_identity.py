"""What a function computes, however it is written: a digest of its syntax tree and of what it reaches in its files.

Run by `compile_server`, in a process with limits, with only the standard library. Equal digests for a comment, blank
lines, a docstring, an annotation, a `print`, an unused function or import, renamed local names, and other goals in the
function's decorator; another one for anything that changes what is computed.
"""

import ast
import hashlib
from collections import deque

_STATEMENTS_WITH_NAME = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
# Of positions, annotations and comments with types nothing is computed; names are written by `_Writer` itself.
_LEFT_OUT = frozenset({"type_comment", "annotation", "returns", "type_params", "ctx", "type_ignores"})


def identity_of(files: dict[str, str], main: str, name: str) -> str:
    """The digest of the object `name` of the file `main`; empty if it is none that can be found by reading.

    Without a name it is that of the file as a script: of what runs, and of what that reaches. `files` are texts by
    path; of those that are no Python all of the text counts.
    """
    modules = {
        _module_name(path): _Module(path, text, is_script=path == main and not name)
        for path, text in files.items()
        if path.endswith(".py")
    }
    start = modules.get(_module_name(main))
    if start is None or (name and name not in start.binders):
        return ""
    digest = hashlib.sha256()
    waiting: deque[tuple[_Module, str]] = deque([(start, name)])
    seen: set[tuple[str, str]] = set()
    entered: set[str] = set()
    while waiting:
        module, reached = waiting.popleft()
        if (module.path, reached) in seen:
            continue
        seen.add((module.path, reached))
        statements = list(module.binders.get(reached, ()))
        if module.path not in entered:
            # What runs when the module is imported.
            entered.add(module.path)
            statements += module.bare
        for statement in statements:
            if id(statement) in module.written and not isinstance(statement, ast.Import | ast.ImportFrom):
                continue
            module.written.add(id(statement))
            writer = _Writer(statement if module is start and reached == name else None)
            writer.statement(statement, reached)
            digest.update("\0".join([module.path if module is not start else "", *writer.parts, "\n"]).encode())
            waiting.extend((module, found) for found in writer.reached)
            for imported, attribute in writer.imported:
                waiting.extend(_reached_in(modules, module, imported, attribute))
    for path in sorted(path for path in files if not path.endswith(".py")):
        digest.update(f"\0{path}\0{files[path]}".encode())
    return digest.hexdigest()


def _module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _reached_in(
    modules: dict[str, "_Module"], module: "_Module", imported: str, attribute: str
) -> list[tuple["_Module", str]]:
    """What an import reaches among the user's own files: one name, or all of a module."""
    if imported.startswith("."):
        level = len(imported) - len(imported.lstrip("."))
        parts = _module_name(module.path).split(".")
        imported = ".".join([*parts[: len(parts) - level], *filter(None, [imported.lstrip(".")])])
    submodule = modules.get(f"{imported}.{attribute}")
    if submodule is not None:
        return [(submodule, found) for found in submodule.binders]
    found_in = modules.get(imported)
    if found_in is None:
        return []
    return [(found_in, attribute)] if attribute in found_in.binders else [(found_in, one) for one in found_in.binders]


class _Module:
    """One file: the statements that bind each of its names, and those that bind none and run on import."""

    def __init__(self, path: str, text: str, *, is_script: bool) -> None:
        self.path = path
        self.binders: dict[str, list[ast.stmt]] = {}
        self.bare: list[ast.stmt] = []
        self.written: set[int] = set()
        for statement in ast.parse(text).body:
            if _is_silent(statement) or (_is_main_guard(statement) and not is_script):
                continue
            # What runs in a script binds names, too: only what is imported or defined counts once it is reached.
            runs = is_script and not isinstance(statement, (*_STATEMENTS_WITH_NAME, ast.Import, ast.ImportFrom))
            names = [] if runs else _bound_names(statement)
            for name in names:
                self.binders.setdefault(name, []).append(statement)
            if not names:
                self.bare.append(statement)


def _is_main_guard(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and "__name__" in {
        node.id for node in ast.walk(statement.test) if isinstance(node, ast.Name)
    }


def _is_silent(statement: ast.stmt) -> bool:
    """Whether a statement computes nothing: a text by itself, or what is printed."""
    if not isinstance(statement, ast.Expr):
        return False
    value = statement.value
    is_print = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "print"
    return is_print or isinstance(value, ast.Constant)


def _bound_names(statement: ast.stmt) -> list[str]:
    """The names that a statement binds where it stands, in order."""
    found: dict[str, None] = {}
    waiting: deque[ast.AST] = deque([statement])
    while waiting:
        node = waiting.popleft()
        if isinstance(node, _STATEMENTS_WITH_NAME):
            found[node.name] = None
            continue
        if isinstance(node, ast.Lambda):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                found[alias.asname or alias.name.partition(".")[0]] = None
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found[node.id] = None
        elif isinstance(node, ast.ExceptHandler) and node.name:
            found[node.name] = None
        waiting.extend(ast.iter_child_nodes(node))
    return list(found)


class _Writer:
    """Writes one statement as a list of texts, and notes the module's names and the imports that it uses.

    `entry` is the statement of the function itself, if this is it: its decorators hold goals.
    """

    def __init__(self, entry: ast.stmt | None) -> None:
        self.parts: list[str] = []
        self.reached: dict[str, None] = {}
        self.imported: dict[tuple[str, str], None] = {}
        self._entry = entry
        # The local names of each function around, by number in the order in which they appear.
        self._scopes: list[dict[str, str]] = []

    def statement(self, statement: ast.stmt, reached: str) -> None:
        """Write a statement of a module; of an import only what binds the name that was reached."""
        if isinstance(statement, ast.Import | ast.ImportFrom):
            self._import(statement, reached)
        else:
            self._write(statement)

    def _import(self, statement: ast.Import | ast.ImportFrom, reached: str = "") -> None:
        for alias in statement.names:
            bound = alias.asname or alias.name.partition(".")[0]
            if reached and bound not in (reached, "*"):
                continue
            if isinstance(statement, ast.ImportFrom):
                source = "." * statement.level + (statement.module or "")
                self.imported[source, alias.name] = None
                self.parts += ["from", source, alias.name]
            else:
                self.imported[alias.name, ""] = None
                self.parts += ["import", alias.name]
            self.parts.append(self._name(bound, is_load=False))

    def _name(self, name: str, *, is_load: bool = True) -> str:
        for scope in reversed(self._scopes):
            if name in scope:
                scope[name] = scope[name] or f"local {sum(1 for number in scope.values() if number)}"
                return scope[name]
        if is_load:
            self.reached[name] = None
        return name

    def _write(self, node: object) -> None:
        if isinstance(node, list):
            self.parts.append("[")
            for each in node:
                if not (isinstance(each, ast.stmt) and _is_silent(each)):
                    self._write(each)
            self.parts.append("]")
        elif isinstance(node, ast.Name):
            self.parts += ["name", self._name(node.id)]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            self._import(node)
        elif isinstance(node, _FUNCTIONS):
            self._function(node)
        elif isinstance(node, ast.AST):
            self.parts.append(type(node).__name__)
            if isinstance(node, ast.ExceptHandler) and node.name:
                self.parts.append(self._name(node.name, is_load=False))
            # The fields of a class with annotations alone are its data.
            left_out = _LEFT_OUT - {"annotation"} if isinstance(node, ast.AnnAssign) and not self._scopes else _LEFT_OUT
            for field, value in ast.iter_fields(node):
                if field not in left_out and not (isinstance(node, ast.ExceptHandler) and field == "name"):
                    self._write(value)
        else:
            self.parts.append(repr(node))

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        self.parts.append(type(node).__name__)
        if not isinstance(node, ast.Lambda):
            is_entry = node is self._entry
            self.parts.append("" if is_entry else self._name(node.name, is_load=False))
            for decorator in node.decorator_list:
                self._write(decorator.func if is_entry and isinstance(decorator, ast.Call) else decorator)
        arguments = node.args
        self._write([*arguments.defaults, *arguments.kw_defaults])
        body = [node.body] if isinstance(node, ast.Lambda) else node.body
        every = [*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg]
        walked = [found for each in body for found in ast.walk(each)]
        outer = {name for found in walked if isinstance(found, ast.Global | ast.Nonlocal) for name in found.names}
        names = [argument.arg for argument in every if argument is not None]
        names += [name for each in body if isinstance(each, ast.stmt) for name in _bound_names(each)]
        self._scopes.append(dict.fromkeys((name for name in names if name not in outer), ""))
        self.parts += [
            f"{kind}{len(group)}"
            for kind, group in (("/", arguments.posonlyargs), ("a", arguments.args), ("*", arguments.kwonlyargs))
        ]
        for argument in every:
            self.parts.append("" if argument is None else self._name(argument.arg, is_load=False))
        self._write(body)
        self._scopes.pop()
