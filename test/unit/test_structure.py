"""The source tree keeps its rules: one import direction, no cycles, size ceilings, one reader of the environment."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from sgling.srt.config.flags import Kind, flag_fields
from sgling.srt.config.server_args import ServerArgs

ROOT = Path(__file__).resolve().parents[2]
TREES = {"sgling": ROOT / "python", "sgling_kernel": ROOT / "sgl-kernel"}
SIZED_DIRS = ("python", "sgl-kernel", "benchmark", "scripts")

# Import order of sgling.srt, top to bottom: a package may import itself and what stands below it.
ORDER = (
    ("entrypoints",),
    ("parser",),
    ("managers",),
    ("constrained",),
    ("speculative",),
    ("model_executor",),
    ("model_loader",),
    ("models",),
    ("layers",),
    ("mem_cache", "distributed", "sampling"),
    ("core",),
    ("kernel",),
)
LEAVES = ("config", "observability")
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}
MAX_FILE, MAX_FUNCTION, MAX_KERNEL_FUNCTION, MAX_PARAMETERS, MAX_OP_PARAMETERS = 400, 50, 120, 8, 20
NOT_NEEDED = ("fastapi", "starlette", "zmq", "pydantic", "uvicorn", "uvloop", "httpx", "prometheus_client", "xgrammar")


@cache
def modules() -> dict[str, Path]:
    """Every module of both packages: dotted name -> file."""
    found = {}
    for package, tree in TREES.items():
        for path in sorted((tree / package).rglob("*.py")):
            parts = path.relative_to(tree).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def _base(name: str, node: ast.ImportFrom) -> str:
    """Absolute name of the module a ``from`` import names."""
    if not node.level:
        return node.module or ""
    parts = name.split(".")
    keep = len(parts) - node.level + (modules()[name].name == "__init__.py")
    return ".".join([*parts[:keep], *([node.module] if node.module else [])])


def imports(name: str) -> Iterator[str]:
    """Modules of ours that a module imports anywhere: at the top, in functions, for types only."""
    for node in ast.walk(parse(modules()[name])):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _base(name, node)
            targets = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules() else base for alias in node.names]
            if base == "sgling" and all(alias.name == "__version__" for alias in node.names):
                continue  # the version is data of the root package, not an import of what it exposes
        else:
            continue
        yield from (target for target in targets if target in modules())


def part(name: str) -> str:
    """Which part of the tree a module belongs to: a package of sgling.srt, bench, training, kernel or root."""
    parts = name.split(".")
    if parts[0] == "sgling_kernel":
        return "kernel"
    if len(parts) > 2 and parts[1] == "srt":
        return parts[2]
    return parts[1] if len(parts) > 1 and parts[1] in ("bench", "training") else "root"


def allowed(source: str, target: str) -> bool:
    """Whether a module of part ``source`` may import one of part ``target``."""
    if source in ("root", target):
        return True
    if source in LEAVES:
        return False
    if source == "bench":  # public interfaces, the chat format, and the generator's prompts with their judges
        return target in (*LEAVES, "root", "parser", "training")
    if source == "training":  # has its own forward; shares the chat format and what lies below the serving runtime
        return target in (*LEAVES, "parser", "root") or LEVEL.get(target, -1) > LEVEL["speculative"]
    if source == "kernel":
        return False
    return target in LEAVES or LEVEL.get(target, -1) > LEVEL[source]


def test_every_package_has_a_place():
    known = {*LEVEL, *LEAVES, "bench", "training", "root"}
    assert {part(name) for name in modules()} <= known


def test_import_order():
    wrong = [
        f"{name} imports {target}"
        for name in modules()
        for target in imports(name)
        if not allowed(part(name), part(target))
    ]
    assert not wrong, "\n".join(wrong)


def test_no_import_cycle():
    state: dict[str, int] = {}

    def visit(name: str, path: tuple[str, ...]) -> None:
        state[name] = 1
        for target in set(imports(name)) - {name}:
            assert state.get(target) != 1, " -> ".join([*path, name, target])
            if target not in state:
                visit(target, (*path, name))
        state[name] = 2

    for name in modules():
        if name not in state:
            visit(name, ())


def sized_files() -> list[Path]:
    return [path for directory in SIZED_DIRS for path in sorted((ROOT / directory).rglob("*.py"))]


def test_file_ceiling():
    sizes = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sized_files()}
    wrong = [f"{path.relative_to(ROOT)}: {size} lines" for path, size in sizes.items() if size > MAX_FILE]
    assert not wrong, "\n".join(wrong)


def test_function_ceilings():
    wrong = []
    for path in sized_files():
        is_kernel, is_op = path.name == "kernel.py", "sgl-kernel" in path.parts
        for node in ast.walk(parse(path)):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            where = f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
            lines = node.end_lineno - node.lineno + 1
            if lines > (MAX_KERNEL_FUNCTION if is_kernel else MAX_FUNCTION):
                wrong.append(f"{where}: {lines} lines")
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = len([argument for argument in arguments if argument.arg not in ("self", "cls")])
            if count > (MAX_OP_PARAMETERS if is_op else MAX_PARAMETERS):
                wrong.append(f"{where}: {count} parameters")
    assert not wrong, "\n".join(wrong)


def _reads_environment(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name == "argparse")
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            if node.module == "argparse" or (node.module == "os" and names & {"environ", "getenv"}):
                yield node.module
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            yield from (f"os.{node.attr}" for name in ("environ", "getenv") if node.attr == name)


def test_only_config_reads_command_line_and_environment():
    wrong = [
        f"{name}: {found}"
        for name, path in modules().items()
        if part(name) != "config"
        for found in _reads_environment(parse(path))
    ]
    assert not wrong, "\n".join(wrong)


# Read by spec_config and ServerArgs themselves, or (radix cache) true of every server until there is such a cache.
READ_IN_CONFIG = re.compile("speculative_.*|(enable_)?linear_(replayssm|rollback).*|config|disable_radix_cache")


def test_every_supported_flag_is_read():
    """A flag that is parsed and then ignored would be a silent lie; hints and missing features are declared as such."""
    runtime = [path for name, path in modules().items() if name.startswith("sgling.srt.") and part(name) != "config"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in runtime)
    supported = [field.name for field, spec in flag_fields(ServerArgs) if spec.kind is Kind.SUPPORTED]
    unread = [name for name in supported if not re.search(rf"args\.{name}\b", text)]
    assert [name for name in unread if not READ_IN_CONFIG.fullmatch(name)] == []


BLOCKED_IMPORT = """
import importlib, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is blocked")

sys.meta_path.insert(0, Blocker())
for name in {names!r}:
    importlib.import_module(name)
import sgling
sgling.Engine
"""


def test_engine_models_and_kernels_import_without_a_web_stack():
    names = [name for name in modules() if part(name) in ("models", "layers", "kernel", "model_executor", "bench")]
    script = BLOCKED_IMPORT.format(blocked=NOT_NEEDED, names=names)
    paths = [str(tree) for tree in TREES.values()]
    script = f"import sys; sys.path[:0] = {paths!r}\n{script}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", TREES)
def test_imports_of_the_installed_package_are_this_tree(package):
    """The tests test this tree: an installed copy elsewhere would make every other test meaningless."""
    module = __import__(package)
    assert Path(module.__file__).resolve().parent == TREES[package] / package
