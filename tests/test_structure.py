"""The structure of the source: layers, docstrings, no unpickling, no global random state, consistent options."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import gpfl
from gpfl.cli import options as flags
from gpfl.core.options import options_of
from gpfl.defences import DefenceConfig
from gpfl.federation import PARTITIONS
from gpfl.methods import METHODS
from gpfl.models import NETS
from gpfl.training.config import RunOptions, TrainOptions

ROOT = Path(gpfl.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))

LAYERS = (
    ("errors", "io", "core"),
    ("models", "methods", "data"),
    ("federation", "defences"),
    ("engine", "inference"),
    ("training",),
    ("privacy",),
    ("experiments", "deploy"),
    ("report",),
    ("cli",),
)
"""Packages from the bottom up: each may import packages of the lines above its own. All may import errors."""

LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}


@cache
def syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def module_name(path: Path) -> str:
    """The dotted name below gpfl: "engine.vmap", "engine"; "" for the package itself."""
    return ".".join(part for part in path.relative_to(ROOT).with_suffix("").parts if part != "__init__")


def imported_modules(path: Path) -> set[str]:
    """The modules of gpfl that a file imports, anywhere in it, as dotted names below gpfl."""
    found = set()
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            found |= {f"{node.module}.{alias.name}" if node.module == "gpfl" else str(node.module) for alias in node.names}
    return {name.removeprefix("gpfl").removeprefix(".") for name in found if name.split(".")[0] == "gpfl"}


def layer_violations(importer: str, imported: str) -> Iterator[str]:
    """Say what is wrong with an import, if anything is."""
    own, other = importer.split(".")[0], imported.split(".")[0]
    if own != other and other not in ("", "errors") and LEVEL[own] <= LEVEL.get(other, len(LAYERS)):
        yield f"{importer} imports {imported}"


def test_root_holds_packages_and_four_files() -> None:
    files = {path.name for path in ROOT.iterdir() if path.is_file()}
    packages = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert files == {"__init__.py", "__main__.py", "errors.py", "py.typed"}
    assert packages | {"errors"} == LEVEL.keys()
    assert len(LAYERS) <= 9


def test_imports_point_down() -> None:
    modules = {module_name(path): path for path in SOURCES if module_name(path) not in ("", "__main__")}
    assert [
        violation
        for importer, path in modules.items()
        for imported in sorted(imported_modules(path))
        for violation in layer_violations(importer, imported)
    ] == []


def test_layer_rule_finds_violations() -> None:
    assert list(layer_violations("core.net", "methods.fedavg")) == ["core.net imports methods.fedavg"]
    assert list(layer_violations("methods.fedavg", "data.table")) == ["methods.fedavg imports data.table"]
    assert list(layer_violations("engine.vmap", "engine.base")) == []
    assert list(layer_violations("core.net", "errors")) == []


def test_every_public_name_has_a_docstring() -> None:
    def public(node: ast.Module | ast.ClassDef, prefix: str) -> Iterator[str]:
        for child in node.body:
            if isinstance(child, ast.FunctionDef | ast.ClassDef) and not child.name.startswith("_"):
                if not ast.get_docstring(child):
                    yield f"{prefix}{child.name}"
                if isinstance(child, ast.ClassDef):
                    yield from public(child, f"{prefix}{child.name}.")

    missing = [name for path in SOURCES for name in public(syntax(path), f"{module_name(path)}: ")]
    assert missing + [module_name(path) for path in SOURCES if not ast.get_docstring(syntax(path))] == []


def test_everything_exported_exists() -> None:
    assert len(gpfl.__all__) == len(set(gpfl.__all__))
    assert all(hasattr(gpfl, name) for name in gpfl.__all__)


def dangerous_calls(source: ast.Module) -> Iterator[str]:
    """Yield imports and calls that can run code from a file or a string."""
    for node in ast.walk(source):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
        yield from (name for name in names if name.split(".")[0] in {"pickle", "dill", "joblib", "marshal", "shelve"})
        if isinstance(node, ast.Call):
            call = ast.unparse(node.func)
            if call in {"torch.load", "torch.save", "eval", "exec", "yaml.load", "os.system"}:
                yield call
            if call in {"np.load", "numpy.load"} and "allow_pickle" not in {keyword.arg for keyword in node.keywords}:
                yield call
        if isinstance(node, ast.keyword) and node.arg in {"allow_pickle", "shell"} and ast.unparse(node.value) != "False":
            yield str(node.arg)


def test_nothing_is_unpickled_or_executed() -> None:
    found = [(module_name(path), call) for path in SOURCES for call in dangerous_calls(syntax(path))]
    # The restricted reader of pickled arrays; tests/data/files/test_unpickler.py attacks it.
    assert {entry for entry in found if entry != ("data.files.unpickler", "pickle")} == set()


def test_danger_rule_finds_what_it_looks_for() -> None:
    text = "import pickle\nfrom pickle import load\nx = torch.load(f)\ny = read(f, allow_pickle=True)\nz = eval(t)\n"
    assert sorted(dangerous_calls(ast.parse(text))) == ["allow_pickle", "eval", "pickle", "pickle", "torch.load"]


def test_random_numbers_come_from_core_randomness_only() -> None:
    global_state = {"torch.manual_seed", "torch.rand", "torch.randperm", "np.random.seed", "np.random.rand", "random.random"}
    for path in SOURCES:
        if module_name(path) != "core.randomness":
            calls = {ast.unparse(node.func) for node in ast.walk(syntax(path)) if isinstance(node, ast.Call)}
            assert not {call for call in calls if call in global_state or call.startswith("np.random.default_rng")}, path


def option_records() -> dict[str, type]:
    named = {"method": METHODS, "partition": PARTITIONS, "net": NETS}
    records = {f"{kind} {name}": record for kind, registry in named.items() for name, record in registry.items()}
    return {**records, "run": RunOptions, "train": TrainOptions, "defence": DefenceConfig}


def test_every_option_has_a_description_and_a_valid_default() -> None:
    for owner, record in option_records().items():
        defaults = {field.name: field.default for field in dataclasses.fields(record)}
        for key, option in options_of(record).items():
            assert len(option.help) > 5, (owner, key)
            assert not option.help.endswith("."), (owner, key)
            default_by_net = defaults[key] != defaults[key]  # NaN
            assert default_by_net or option.allows(defaults[key]), (owner, key)


def test_every_method_has_a_file_and_a_docstring_with_its_paper() -> None:
    for name, method in METHODS.items():
        assert method.__module__ == f"gpfl.methods.{name.replace('-', '_')}"
        assert "\n" in (method.__doc__ or ""), name


def test_every_option_has_one_flag() -> None:
    names = [flags.flag_name(section, key) for section in flags.RECORDS for key in flags.keys_of(section)]
    assert len(names) == len(set(names))
