"""The design, held by parsing the sources: what may import what, how long things are, and that all is documented."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "bitdraft"
MODULES = {
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
}

LAYERS = (
    ("errors",),
    ("types",),
    ("ops",),
    ("formats",),
    ("models", "decoding"),
    ("drafters",),
    ("engine", "quantize"),
    ("measure", "serve"),
    ("cli",),
)
"""From the bottom up (docs/explanation/architecture.md). Parts of one layer are siblings."""

HEIGHT = {part: height for height, layer in enumerate(LAYERS) for part in layer}
VAGUE = {"utils", "util", "helpers", "helper", "common", "misc", "tools", "manager"}
LONGEST_MODULE, LONGEST_FUNCTION = 400, 60


def part_of(module: str) -> str | None:
    """The part of a module, such as 'ops' of bitdraft.ops.packed; None for the package itself."""
    return module.split(".")[1] if "." in module else None


def imported_modules(module: str, is_package: bool, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, full name) of every module that is imported anywhere in the file, relative imports resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ""
            if node.level:
                parts = module.split(".")
                base = ".".join(parts[: len(parts) - node.level + is_package])
            name = ".".join(filter(None, (base, node.module)))
            # `from . import reference` names modules, or values of the package such as __version__.
            yield from ((node.lineno, f"{name}.{alias.name}" if node.module is None else name) for alias in node.names)


def layer_faults(module: str, is_package: bool, source: str) -> list[str]:
    """Imports that do not go down."""
    faults = []
    own = part_of(module)
    for line, imported in imported_modules(module, is_package, ast.parse(source)):
        part = part_of(imported)
        if not imported.startswith("bitdraft") or part == own or (part is not None and part.startswith("__")):
            continue
        if own is None or part is None or HEIGHT[part] >= HEIGHT[own]:
            faults.append(f"{module}, line {line}: {own} imports {imported}")
    return faults


def foreign_imports(module: str, is_package: bool, source: str) -> set[str]:
    """Top-level names of imported packages that are neither ours nor Python's."""
    names = {name.split(".")[0] for _, name in imported_modules(module, is_package, ast.parse(source))}
    return {name for name in names if name not in sys.stdlib_module_names and name != "bitdraft"}


def definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """(name, node) of every class, method and function of a file that is not inside a function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        if isinstance(node, ast.ClassDef):
            yield from definitions(node, f"{prefix}{node.name}.")


def undocumented(source: str) -> list[str]:
    """Public classes, methods and functions without a docstring, and the module itself."""
    tree = ast.parse(source)
    missing = [
        name
        for name, node in definitions(tree)
        if not any(part.startswith("_") for part in name.split(".")) and not ast.get_docstring(node)
    ]
    return ([] if ast.get_docstring(tree) or not tree.body else ["the module"]) + missing


def long_functions(source: str) -> list[str]:
    """Functions of more lines than fit a screen, signature and docstring included."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > LONGEST_FUNCTION:
                found.append(f"{node.name}: {lines} lines")
    return found


def read(module: str) -> tuple[str, bool, str]:
    path = MODULES[module]
    return module, path.name == "__init__.py", path.read_text(encoding="utf-8")


@pytest.mark.parametrize("module", MODULES)
def test_imports_only_go_down(module):
    assert layer_faults(*read(module)) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("bitdraft.ops.x", "from ..engine import engine"),
        ("bitdraft.ops.x", "from ..models.kv import Pool"),
        ("bitdraft.models.x", "from ..decoding.verify import verify"),
        ("bitdraft.decoding.x", "import bitdraft.models.kv"),
        ("bitdraft.engine.x", "def late():\n    from ..quantize import load"),
        ("bitdraft.quantize.x", "from .. import engine"),
        ("bitdraft.measure.x", "from ..serve import generate"),
        ("bitdraft.errors", "from .types import Proposal"),
        ("bitdraft.measure.x", "from ..cli import app"),
        ("bitdraft", "from . import types"),
    ],
)
def test_an_import_that_does_not_go_down_is_noticed(module, source):
    assert len(layer_faults(module, module == "bitdraft", source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("bitdraft.engine.x", "from ..decoding.verify import verify\nfrom ..errors import UsageError\nimport torch"),
        ("bitdraft.models.x", "from .kv import Pool\nfrom . import gguf"),
        ("bitdraft.cli", "from . import __version__\nfrom .measure.run import run"),
    ],
)
def test_an_import_that_goes_down_is_allowed(module, source):
    assert layer_faults(module, False, source) == []


def test_every_part_has_a_layer():
    assert {part_of(module) for module in MODULES} - {None} <= set(HEIGHT)


def packages(requirements: list[str]) -> set[str]:
    """Names of modules of required packages."""
    names = {re.split(r"[^\w-]", name)[0].replace("-", "_") for name in requirements}
    return {"opentelemetry" if name.startswith("opentelemetry_") else name for name in names}


def test_only_declared_packages_are_imported():
    """Those of an extra only inside functions, or where types are checked: without the extra the module still loads."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared, optional = packages(project["dependencies"]), project["optional-dependencies"]
    extras = packages([name for extra in optional if extra != "dev" for name in optional[extra]])
    foreign = {module: foreign_imports(*read(module)) - declared for module in MODULES}
    assert {module: names for module, names in foreign.items() if names - extras} == {}
    for module in (module for module, names in foreign.items() if names):
        source = ast.parse(read(module)[2])
        loaded = [node for node in source.body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not {name.split(".")[0] for _, name in imported_modules(module, False, ast.Module(loaded, []))} & extras


@pytest.mark.parametrize("module", MODULES)
def test_modules_are_short(module):
    assert len(read(module)[2].splitlines()) <= LONGEST_MODULE


@pytest.mark.parametrize("module", MODULES)
def test_functions_fit_a_screen(module):
    assert long_functions(read(module)[2]) == []


def test_a_long_function_is_noticed():
    assert long_functions("def f():\n" + "    x = 1\n" * 60) == ["f: 61 lines"]
    assert long_functions("def f():\n" + "    x = 1\n" * 59) == []


def test_names_say_what_is_inside():
    assert [module for module in MODULES if VAGUE & set(module.split("."))] == []


@pytest.mark.parametrize("module", MODULES)
def test_everything_public_is_documented(module):
    assert undocumented(read(module)[2]) == []


def test_something_undocumented_is_noticed():
    source = (
        '"""m"""\nclass A:\n    """a"""\n    def b(self): ...\n    def _c(self): ...\ndef d(): ...\ndef _e(): ...\n'
    )
    assert undocumented(source) == ["A.b", "d"]
    assert undocumented("x = 1") == ["the module"]
