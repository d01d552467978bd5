"""The rules of the house, read from the source text: sizes, names, imports, and documents that point somewhere."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from kits.sentences_read import constants_of, sentences_read

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "springtide"
STUDIES = ROOT / "studies" / "src" / "springtide_studies"
STUDY_TESTS = ROOT / "studies" / "tests"
DOCS = ROOT / "docs"
MAX_FILE_LINES = 500
# One cohesive class may be longer than a file of several things.
MAX_CLASS_FILE_LINES = 800
MAX_FILES_OF_A_FOLDER = 20
MAX_SIBLINGS_WITH_A_PREFIX = 3
MAX_VAGUE_ACTORS = 60
MAX_FUNCTION_LINES = 70
MAX_ARCHITECTURE_LINES = 300
ROOMS_THAT_MAY_SPEAK_OF_SIMULATION = {"simulator", "cli"}
NAMES_THAT_SAY_NOTHING = {"utils", "util", "helpers", "helper", "common", "manager", "misc", "new", "stuff", "base"}
# What turns bytes into code, or hides who talks to whom.
BANNED_MODULES = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "multiprocessing"}
BANNED_CALLS = {("torch", "load"), ("torch", "save")}
RECORD_HEADINGS = ["Context", "Decision", "Why not the others", "How we will know it was wrong"]
# What is tested through something else than a test file, a test's import, or the face of its room; and through what.
WITHOUT_A_TEST_OF_THEIR_OWN = {
    "backends/control_channel/driver.py": "a protocol: both drivers' tests",
    "studies/src/springtide_studies/commands/profile_surfaces.py": "springtide profile --surface: tests/cli/profiles",
    "studies/src/springtide_studies/serving/applications/bento.py": "springtide bench serving, where BentoML is",
    "studies/src/springtide_studies/serving/applications/lit.py": "springtide bench serving, where LitServe is",
    "studies/src/springtide_studies/serving/applications/ray_serve.py": "springtide bench serving, where Ray is",
    "studies/src/springtide_studies/rows.py": "the rows of the benches: studies/tests",
    "cli/samples/serving.py": "springtide hello deploys it: tests/end_to_end",
    "cli/samples/training.py": "springtide hello trains it: tests/end_to_end",
    "cli/platform/platform_process.py": "springtide up and down: tests/end_to_end",
    "control/edits.py": "the hands of transitions and effects: tests/control",
    "core/decision.py": "values and a protocol: tests/policies",
    "core/ports.py": "protocols: every executor's and journal's tests",
    "core/context.py": "a protocol: tests/runtime",
    "core/resources.py": "values: tests/policies",
    "runtime/elastic/context.py": "what user code sees: tests/runtime trains through it",
    "runtime/script.py": "the way of scripts: tests/runtime and tests/end_to_end",
    "service/lookup.py": "behind the routes: tests/service",
    "service/gateway/replica_client.py": "behind the gateway: tests/service",
    "service/submission/schemas.py": "behind the routes: tests/service",
    "service/submission/sources.py": "behind the routes: tests/service",
}
# Sentences that other systems write, where they tell the case by nothing else; and kits that check sentences.
SENTENCES_THAT_MAY_BE_READ = {
    "backends/functions/parameter_store/redis_check.py": "a Redis begins an error with its code",
    "backends/functions/providers/alibaba.py": "Function Compute tells ends and refusals in messages and logs",
    "backends/functions/providers/aws.py": "Lambda tells timeouts and kills in the message of the answer",
    "backends/functions/providers/aws_errors.py": "AWS has one code for many faults of a function's settings",
    "backends/kubernetes/client/cache.py": "an API server refuses a version that it has not seen with a message only",
    "backends/kubernetes/client/errors.py": "an API server refuses by a quota with the status of any forbidden call",
    "cli/commands/hello.py": "what the sample service has to answer",
    "client/kubernetes.py": "an API server answers with one status for a missing namespace and a missing kind",
    "runtime/adoption.py": "calls of the context are called otherwise in a script; nothing is decided",
    "runtime/data/batch_loader.py": "torch tells the death of a loader's process in the text of a RuntimeError",
    "runtime/script.py": "gloo and NCCL tell a lost peer in the text of a RuntimeError",
    "service/submission/schemas.py": "pydantic begins its sentences with the same words, which are left out",
    "storage/stores/redis.py": "a Redis and its client tell the case in the error's text",
    "storage/stores/s3.py": "obstore tells the status and the cause in the error's text",
    "testing/trace_reader.py": "a kit that holds readers to naming the line in their errors",
}
# Inheritance across files that stands until its classes hold each other instead. The list only gets shorter.
INHERITANCE_TO_BE_REPLACED: frozenset[str] = frozenset()
PRODUCT_FILES = sorted(SOURCE.rglob("*.py"))
PYTHON_FILES = [*PRODUCT_FILES, *sorted(STUDIES.rglob("*.py"))]
TEST_FILES = sorted([*(ROOT / "tests").rglob("*.py"), *STUDY_TESTS.rglob("*.py")])
# Folders of tests that belong to no single file: whole platforms, clusters, devices, and the rules themselves.
TESTS_OF_THE_WHOLE = {
    *(
        "benchmarks",
        "conformance",
        "end_to_end",
        "examples",
        "golden",
        "gpu",
        "kits",
        "kubernetes",
        "native",
        "planted",
    ),
    *("replay", "simulation"),
}
DOCUMENTS = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE if SOURCE in path.parents else ROOT).as_posix()


def package_of(path: Path) -> Path:
    return SOURCE if SOURCE in path.parents else STUDIES


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def room_of(path: Path) -> str:
    parts = path.relative_to(package_of(path)).parts
    return parts[0] if len(parts) > 1 else ""


def functions_of(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def holds_code(tree: ast.Module) -> bool:
    """Whether a module has behaviour of its own: a function, or a class with one."""
    return any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in ast.walk(tree))


def module_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements that run at import, those inside `if` and `try` included."""
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop(0)
        yield node
        if isinstance(node, ast.If | ast.Try):
            for part in ("body", "orelse", "finalbody"):
                waiting += getattr(node, part, [])


def test_there_is_something_to_check() -> None:
    assert len(PYTHON_FILES) > 50
    assert len(DOCUMENTS) > 10


def test_files_are_short() -> None:
    long = {}
    for path in PYTHON_FILES:
        classes = [node for node in tree_of(path).body if isinstance(node, ast.ClassDef)]
        largest = max(((node.end_lineno or 0) - node.lineno + 1 for node in classes), default=0)
        count = len(path.read_text().splitlines())
        limit = MAX_CLASS_FILE_LINES if largest > MAX_FILE_LINES // 2 else MAX_FILE_LINES
        if count > limit:
            long[name_of(path)] = count
    assert not long, f"too long; split by what changes together: {long}"


def test_folders_are_small() -> None:
    full = {
        name_of(folder): count
        for package in (SOURCE, STUDIES)
        for folder in sorted({path.parent for path in package.rglob("*.py")})
        if (count := len([path for path in folder.glob("*.py") if path.stem != "__init__"])) > MAX_FILES_OF_A_FOLDER
    }
    assert not full, f"over {MAX_FILES_OF_A_FOLDER} files at one level: {full}"


def test_a_prefix_of_four_files_is_a_folder() -> None:
    families = {}
    for folder in sorted({path.parent for path in PYTHON_FILES}):
        prefixes = Counter(path.stem.split("_")[0] for path in folder.glob("*.py") if path.stem != "__init__")
        families |= {
            f"{name_of(folder)}/{prefix}_*": n for prefix, n in prefixes.items() if n > MAX_SIBLINGS_WITH_A_PREFIX
        }
    assert not families, f"make folders of these: {families}"


def test_each_public_class_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = {}
    for path in PYTHON_FILES:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(name_of(path))
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert not twice, f"a search for one of these finds another: {twice}"


def is_interface(node: ast.ClassDef) -> bool:
    """Fields, and methods that only say what others must do: a docstring, `...` or an error."""

    def says_only(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
        return all(
            isinstance(part, ast.Raise | ast.Pass)
            or (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
            for part in method.body
        )

    return all(says_only(part) for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef))


def test_no_class_inherits_behaviour_from_another_file() -> None:
    """A class's code is read in one file; from others come interfaces, errors and plain fields."""
    defined = {
        (dotted_name(path), node.name): node
        for path in PYTHON_FILES
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef)
    }
    found = []
    for path in PYTHON_FILES:
        sources = {
            alias.asname or alias.name: (node.module or "", alias.name)
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.ClassDef):
                continue
            for base in node.bases:
                name = ast.unparse(base).split("[")[0]
                parent = defined.get(sources.get(name, ("", "")))
                if parent is not None and not is_interface(parent) and not is_error(parent.name):
                    found.append(f"{name_of(path)}:{node.name} <- {name}")
    unknown = sorted(set(found) - INHERITANCE_TO_BE_REPLACED)
    assert not unknown, f"hold one instead of being one: {unknown}"
    done = sorted(INHERITANCE_TO_BE_REPLACED - set(found))
    assert not done, f"take these off the list: {done}"


def is_frozen(node: ast.ClassDef) -> bool:
    """Whether a class is declared as a frozen struct or a frozen dataclass."""
    calls = [call.keywords for call in node.decorator_list if isinstance(call, ast.Call)]
    keywords = [keyword for group in (node.keywords, *calls) for keyword in group]
    return any(each.arg == "frozen" and isinstance(each.value, ast.Constant) and each.value.value for each in keywords)


def test_policies_are_values() -> None:
    """A class that decides is frozen, says all its fields when it is made, and writes to none of them."""
    rooms = [
        *(SOURCE / "scheduling" / room for room in ("policies", "loans", "sharing")),
        STUDIES / "rivals" / "policies",
    ]
    mutable: list[str] = []
    for path in (path for room in rooms for path in sorted(room.rglob("*.py"))):
        if "object.__setattr__" in path.read_text(encoding="utf-8"):
            mutable.append(f"{name_of(path)} writes to a frozen object")
        for node in ast.walk(tree_of(path)):
            methods = {each.name for each in ast.iter_child_nodes(node) if isinstance(each, ast.FunctionDef)}
            if not isinstance(node, ast.ClassDef) or not methods & {"decide", "choose"} or "Protocol" in bases_of(node):
                continue
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            hidden = [
                each for each in fields if "init=False" in ast.unparse(each) or "compare=False" in ast.unparse(each)
            ]
            if "__init__" in methods or hidden or (fields and not is_frozen(node)):
                mutable.append(f"{name_of(path)}:{node.lineno} {node.name}")
    assert not mutable, f"what a policy remembers is in Plan.memory, what it derives in a DecisionCache: {mutable}"


def bases_of(node: ast.ClassDef) -> set[str]:
    return {ast.unparse(base) for base in node.bases}


def is_error(name: str) -> bool:
    return name.endswith("Error") or name in {"Fenced", "InvalidRequest", "NotFound", "Conflict", "Superseded"}


def test_functions_are_short() -> None:
    long = []
    for path in PYTHON_FILES:
        for node in functions_of(tree_of(path)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                long.append(f"{name_of(path)}:{node.lineno} {node.name} has {length} lines")
    assert not long, f"over {MAX_FUNCTION_LINES} lines: {long}"


def test_every_module_says_what_belongs_there() -> None:
    mute = [name_of(path) for path in PYTHON_FILES if path.read_text().strip() and not ast.get_docstring(tree_of(path))]
    assert not mute, f"no module docstring: {mute}"


def test_only_the_simulator_and_its_command_speak_of_simulation() -> None:
    found = [
        f"{name_of(path)}:{number}"
        for path in PRODUCT_FILES
        if room_of(path) not in ROOMS_THAT_MAY_SPEAK_OF_SIMULATION
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "simulat" in line.lower()
    ]
    assert not found, f"the platform must not know whether its executor is made of models: {found}"


def test_the_source_names_who_acts() -> None:
    """ "The worker exits", "the caller", "no replica": words that name no actor make a sentence a riddle."""
    vague = re.compile(r"\b(whoever|nobody|somebody|everybody)\b", re.IGNORECASE)
    count = sum(len(vague.findall(path.read_text(encoding="utf-8"))) for path in PYTHON_FILES)
    assert count < MAX_VAGUE_ACTORS, f"{count} uses of whoever, nobody, somebody or everybody"


def test_logic_does_not_read_sentences() -> None:
    """Sentences are for people: reworded they still say the same, so the program decides by codes and facts."""
    constants = constants_of(tree_of(path) for path in PRODUCT_FILES)
    found = {name_of(path): sentences_read(tree_of(path), constants) for path in PRODUCT_FILES}
    places = {name: readings for name, readings in found.items() if readings}
    unknown = [
        f"{name}:{reading.line} in {reading.inside}: {reading.expression}"
        for name, readings in places.items()
        if name not in SENTENCES_THAT_MAY_BE_READ
        for reading in readings
    ]
    assert not unknown, f"decide by a code, like those of core/reasons.py: {unknown}"
    stale = sorted(SENTENCES_THAT_MAY_BE_READ.keys() - places.keys())
    assert not stale, f"no sentence is read there: {stale}"


@pytest.mark.parametrize(
    "source",
    [
        'if record.reason == "no device is free": pass',
        'if "Is it free?" != job.lifecycle.reason.text: pass',
        'if anything in ("waiting", "waits for devices"): pass',
        'if "device" in record.reason: pass',
        'if "device" in str(error): pass',
        'if told["reason"].startswith("refused"): pass',
        'if told.get("message", "").lower().endswith("later"): pass',
        'what = str(error).partition(";")[0]',
        'what = refusal.split(": ")[1]',
        'text = str(error).replace("--functions-", "functions.")\nif "slots" in text: pass',
        'try:\n    run()\nexcept ValueError as wrong:\n    print(str(wrong).removeprefix("cannot be"))',
        'import re\nfound = re.search(r"(\\d+) workers?", entry.text)',
        'import re\n_COUNT = re.compile(r"resized (\\d+)")\ndef count(entry): return _COUNT.match(entry.text)',
        'NO_ROOM = "no device is free"\nif reason == NO_ROOM: pass',
        'if change.text().endswith("after a loss"): pass',
        'match reason:\n    case "not known yet": pass',
    ],
)
def test_a_sentence_that_is_read_is_found(source: str) -> None:
    assert sentences_read(ast.parse(source), {})


@pytest.mark.parametrize(
    "source",
    [
        'if record.reason == "OOMKilled": pass',
        'if pod.reason in ("Evicted", "Preempted"): pass',
        "if service.reason != reason: pass",
        'if record.reason.change.code == "resize": pass',
        'reason = f"{name} has no room: {error}"',
        'lines = record.reason.split("\\n")',
        'first, _, rest = text.partition("=")',
        'parts = text.split(", ")',
        'if line.startswith("MemAvailable:"): pass',
        'if address.startswith("unix://"): pass',
        'if text.startswith("sha256:"): pass',
        'import re\n_NAME = re.compile(r"[a-z]+")\nif _NAME.fullmatch(text): pass',
        'import re\nhead = re.sub(r"[^a-z0-9]+", "-", text)',
        'if key in {"reason": "no device is free"}: pass',
        'match action.cause:\n    case "plan": pass',
        'raise ValueError("the reason is not known: " + reason)',
    ],
)
def test_codes_and_input_are_no_sentences(source: str) -> None:
    assert not sentences_read(ast.parse(source), {})


def test_imports_are_absolute() -> None:
    relative = [
        f"{name_of(path)}:{node.lineno}"
        for path in PYTHON_FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not relative, relative


def imports_of(tree: ast.AST, modules: Container[str]) -> Iterator[str]:
    """Those of `modules` that a file imports, in functions too; not what it imports for the type checker only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        named: list[str] = []
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from package import module` needs the module; `from module import name` the module before the name.
            named = [f"{node.module}.{alias.name}" for alias in node.names]
            named = [name if name in modules else node.module for name in named]
        yield from (name for name in named if name in modules)
        yield from imports_of(node, modules)


def find_circle(imports: Mapping[str, Iterable[str]]) -> list[str]:
    """Modules that import each other in a circle, the first one again at its end; none where there is no circle."""
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_modules_import_each_other_in_one_direction() -> None:
    """A circle through an import in a function is one, too: neither module can be read or moved without the other."""
    modules = {dotted_name(path): path for path in PYTHON_FILES}
    circle = find_circle({name: set(imports_of(tree_of(path), modules)) for name, path in modules.items()})
    assert not circle, f"move what they share into a module that both import: {' <- '.join(circle)}"


def test_a_planted_circle_is_found() -> None:
    planted = {
        "room.first": "from room import second\n",
        "room.second": "def later():\n    from room.third import value\n",
        "room.third": "import room.first\n",
        "room.reader": "import room.first\nfrom room.second import later\n",
    }
    imports = {name: set(imports_of(ast.parse(text), planted)) for name, text in planted.items()}
    assert imports["room.reader"] == {"room.first", "room.second"}
    circle = find_circle(imports)
    assert circle[0] == circle[-1]
    assert set(circle) == {"room.first", "room.second", "room.third"}
    planted["room.third"] = "if TYPE_CHECKING:\n    import room.first\n"
    assert not find_circle({name: set(imports_of(ast.parse(text), planted)) for name, text in planted.items()})


def test_names_say_what_they_hold() -> None:
    vague = [
        name_of(path)
        for path in [*PYTHON_FILES, *{path.parent for path in PYTHON_FILES}]
        if NAMES_THAT_SAY_NOTHING & set(path.stem.split("_")) or re.search(r"_v\d+$", path.stem)
    ]
    assert not vague, f"these names fit anything: {vague}"


def test_modules_hold_no_mutable_state() -> None:
    found = []
    for path in PYTHON_FILES:
        for node in module_level(tree_of(path)):
            if isinstance(node, ast.AugAssign):
                found.append(f"{name_of(path)}:{node.lineno} changes a module's variable")
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            is_mutable = isinstance(
                node.value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
            )
            is_mutable |= (
                isinstance(node.value, ast.Call)
                and isinstance(node.value.func, ast.Name)
                and node.value.func.id in {"list", "dict", "set", "defaultdict", "deque", "Counter"}
            )
            if is_mutable and any(name != name.upper() and not name.startswith("__") for name in names):
                found.append(f"{name_of(path)}:{node.lineno} {', '.join(names)}")
        found += [
            f"{name_of(path)}:{node.lineno} global {', '.join(node.names)}"
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.Global)
        ]
    assert not found, f"state belongs to an object that somebody makes: {found}"


def test_constants_are_never_changed() -> None:
    """A name in capitals at module level is not appended to, updated or assigned into anywhere in its module."""
    changing = {
        "append",
        "extend",
        "insert",
        "add",
        "update",
        "pop",
        "popitem",
        "remove",
        "discard",
        "clear",
        "setdefault",
    }
    found = []
    for path in PYTHON_FILES:
        constants = {
            target.id
            for node in module_level(tree_of(path))
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name) and target.id == target.id.upper()
        }
        for node in ast.walk(tree_of(path)):
            changed: ast.expr | None = None
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in changing:
                changed = node.func.value
            elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
                changed = node.value
            if isinstance(changed, ast.Name) and changed.id in constants:
                found.append(f"{name_of(path)}:{node.lineno} changes {changed.id}")
    assert not found, found


def test_text_reaches_terminals_by_one_way() -> None:
    """Text of users may hold escape sequences: `cli/terminal.py` alone prints, and makes them visible."""
    printing = [
        name_of(path)
        for path in PYTHON_FILES
        if "/cli/" in str(path) or "/commands/" in str(path)
        if path.name != "terminal.py"
        if re.search(r"click\.s?echo|\bfrom rich\.text\b", path.read_text(encoding="utf-8"))
    ]
    assert not printing, f"print by springtide.cli.terminal: {printing}"


def test_types_are_decoded_by_one_way() -> None:
    """Two threads that are the first to decode a type crash the process: `core/decoding.py` keeps them apart."""
    by_itself = re.compile(
        r"msgspec\.convert\(|msgspec\.(json|msgpack)\.(Decoder\(|decode\((?:[^()]|\([^()]*\))*\btype=)"
    )
    product = [path for path in PYTHON_FILES if not name_of(path).startswith("studies/")]
    found = [name_of(path) for path in product if by_itself.search(path.read_text(encoding="utf-8"))]
    assert found == ["core/decoding.py"], "decode by springtide.core.decoding"


def test_no_bytes_become_objects_or_code() -> None:
    found = []
    for path in PYTHON_FILES:
        for node in ast.walk(tree_of(path)):
            modules: list[str] = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
                modules += [f"{node.module}.{alias.name}" for alias in node.names]
            for module in modules:
                parts = module.split(".")
                if parts[0] in BANNED_MODULES or parts[:2] == ["torch", "multiprocessing"]:
                    found.append(f"{name_of(path)}:{node.lineno} imports {module}")
                if tuple(parts[:2]) in BANNED_CALLS:
                    found.append(f"{name_of(path)}:{node.lineno} imports {module}")
            if isinstance(node, ast.Attribute):
                owner = node.value.id if isinstance(node.value, ast.Name) else ""
                if (owner, node.attr) in BANNED_CALLS:
                    found.append(f"{name_of(path)}:{node.lineno} uses {owner}.{node.attr}")
                if re.search(r"(gather|scatter|broadcast|send|recv)_object(_list)?$|^all_gather_object$", node.attr):
                    found.append(f"{name_of(path)}:{node.lineno} uses {node.attr}")
    assert not found, f"safetensors for tensors, msgspec for messages: {found}"


def home_of_tests(path: Path) -> Path:
    """Where the tests of a source file are: the tests mirror the source tree, folder by folder."""
    tests = ROOT / "tests" if SOURCE in path.parents else STUDY_TESTS
    inside = path.relative_to(package_of(path))
    name = path.stem if path.stem != "__init__" else path.parent.name
    return tests / inside.parent / f"test_{name}.py"


def modules_named_in(path: Path) -> Iterator[str]:
    """Dotted names of what a file imports, names in modules included, and of what it loads by a dotted string."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"springtide(?:_studies)?(?:\.\w+)+", node.value)


def dotted_name(path: Path) -> str:
    package = package_of(path)
    return ".".join([package.name, *path.relative_to(package).with_suffix("").parts]).removesuffix(".__init__")


@functools.cache
def modules_with_tests() -> frozenset[str]:
    """What tests ask for: modules with a test file of their own or imported by a test, and the parts these are made of.

    A part is a module of the same room that a tested module imports: it is tested through the face it belongs to.
    """
    asked_for = {name for path in TEST_FILES for name in modules_named_in(path)}
    tested = {
        path
        for path in PYTHON_FILES
        if dotted_name(path).removesuffix(".__main__") in asked_for or home_of_tests(path).is_file()
    }
    parts = {name for path in tested for name in modules_named_in(path) if name.split(".")[1:2] == [room_of(path)]}
    return frozenset({dotted_name(path) for path in tested} | parts)


def test_every_module_with_code_has_its_tests() -> None:
    untested = [
        name_of(path)
        for path in PYTHON_FILES
        if holds_code(tree_of(path))
        and name_of(path) not in WITHOUT_A_TEST_OF_THEIR_OWN
        and dotted_name(path) not in modules_with_tests()
    ]
    assert not untested, (
        f"neither a test_<file>.py in the same folder of the tests nor a test that imports it: {untested}"
    )


def test_tests_stand_where_their_source_stands() -> None:
    """Every folder of tests is one of the source tree, or one of those that test the whole."""
    lost = []
    for path in TEST_FILES:
        tests, package = (ROOT / "tests", SOURCE) if ROOT / "tests" in path.parents else (STUDY_TESTS, STUDIES)
        inside = path.parent.relative_to(tests)
        if inside.parts and inside.parts[0] not in TESTS_OF_THE_WHOLE and not (package / inside).is_dir():
            lost.append(path.relative_to(ROOT).as_posix())
    assert not lost, f"no folder of the source tree is called like theirs: {lost}"


def test_no_exception_to_the_rules_is_stale() -> None:
    stale = [
        name for name in WITHOUT_A_TEST_OF_THEIR_OWN if not (SOURCE / name).is_file() and not (ROOT / name).is_file()
    ]
    assert not stale, stale


def links_of(document: Path) -> Iterator[str]:
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"`[^`\n]*`", "", text)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target):
            yield target


def anchors_of(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_of_documents_resolve(document: Path) -> None:
    for link in links_of(document):
        target, _, anchor = link.partition("#")
        place = (document.parent / target).resolve() if target else document
        assert place.exists(), f"{name_of(document)} points to {link}"
        if anchor and place.suffix == ".md":
            assert anchor in anchors_of(place), f"{name_of(document)} points to {link}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_files_that_documents_name_exist(document: Path) -> None:
    """Paths in backquotes that begin like paths of this repository are checked like links."""
    for path in re.findall(
        r"`((?:src|studies|tests|docs|examples|benchmarks)/[\w./-]+)`", document.read_text(encoding="utf-8")
    ):
        assert (ROOT / path).exists(), f"{name_of(document)} names {path}"
    for path in re.findall(
        r"`((?!src/|studies/|tests/|docs/|examples/)[a-z_]+(?:/[a-z_0-9]+)+\.py)`", document.read_text("utf-8")
    ):
        assert any((folder / path).exists() for folder in (SOURCE, STUDIES.parent, ROOT)), (
            f"{name_of(document)} names {path}"
        )


@pytest.mark.parametrize("record", sorted((DOCS / "decisions").glob("*.md")), ids=lambda path: path.stem)
def test_decision_records_have_their_four_headings(record: Path) -> None:
    assert re.fullmatch(r"\d{4}-[a-z0-9-]+", record.stem)
    text = record.read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", text, flags=re.MULTILINE) == RECORD_HEADINGS
    assert text.startswith(f"# {int(record.stem[:4])}. ")
    assert len(text.splitlines()) <= 60, "one page"


def test_decision_records_are_numbered_without_gaps() -> None:
    numbers = sorted(int(record.stem[:4]) for record in (DOCS / "decisions").glob("*.md"))
    assert numbers == list(range(1, len(numbers) + 1))


def test_architecture_fits_in_one_reading_and_names_every_room() -> None:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_ARCHITECTURE_LINES
    rooms = {path.parent.name for path in SOURCE.glob("*/*.py")}
    missing = [room for room in sorted(rooms) if f"`{room}/`" not in text]
    assert not missing, f"docs/architecture.md does not say what belongs in {missing}"


def test_every_policy_has_its_page() -> None:
    from springtide.scheduling.registry import POLICY_NAMES

    missing = [name for name in POLICY_NAMES if not (DOCS / "policies" / f"{name}.md").is_file()]
    assert not missing, f"docs/policies has no page for {missing}"


def test_no_tracked_file_names_a_machine() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    place = re.compile(r"(?<![\w.~}])/(?:home|Users|work|root)/[A-Za-z0-9]")
    found = []
    for name in listed.stdout.decode().split("\0"):
        path = ROOT / name
        if not name or not path.is_file() or path == Path(__file__).resolve():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{name}:{number}" for number, line in enumerate(text.splitlines(), 1) if place.search(line)]
    assert not found, f"a path that exists on one machine only: {found}"
