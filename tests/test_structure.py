"""The shape of the source: imports point one way, everything public has words, nothing is unpickled."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpfl
from gpfl.cli import flags
from gpfl.core.options import options_of
from gpfl.defences import DefenceConfig
from gpfl.federation.partition import PARTITIONS
from gpfl.methods import METHODS
from gpfl.models import NETS
from gpfl.training.config import RunOptions, TrainOptions

ROOT = Path(gpfl.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))

LAYERS = (
    ("errors", "randomness", "tree", "evaluate", "origin"),
    ("ranks",),
    ("options", "toml", "files", "losses", "form", "modules"),
    ("net",),
    ("method", "nets"),
    ("methods", "data"),
    ("reference_division", "schedule"),
    ("partition",),
    ("federation", "rounds"),
    ("defence",),
    ("engine", "config", "runs"),
    ("simulate",),
    ("result",),
    ("api",),
    ("study",),
    ("report", "progress", "flags", "arguments"),
    ("terminal", "privacy"),
    ("data_command", "attack_command", "grid_plan", "grid_progress", "grid_tables"),
    ("given",),
    ("tune_command", "privacy_command"),
    ("reproduce_command",),
    ("cli",),
    ("__main__",),
)
"""Modules and packages from the ground up: each may import what stands in a line above its own, or lies in its own package."""

LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def module_name(path: Path) -> str:
    """The dotted name of a source file below gpfl: "engine.loop", "engine" or "net"; the package itself is ""."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports(path: Path) -> set[str]:
    """The names of gpfl's own modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "gpfl"}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            if node.module and node.module.split(".")[0] == "gpfl":
                found |= {resolved(node.module, alias.name) for alias in node.names}
    return {name.removeprefix("gpfl").removeprefix(".") for name in found}


def resolved(module: str, name: str) -> str:
    """What `from module import name` takes from: the submodule, if it is one."""
    folder = ROOT.parent / module.replace(".", "/") / name
    return f"{module}.{name}" if folder.is_dir() or folder.with_suffix(".py").is_file() else module


def broken_rules(importer: str, imported: str) -> Iterator[str]:
    """What is wrong with an import, if anything is."""
    own, other = importer.split(".")[0], imported.split(".")[0]
    if other == "":
        if importer not in ("api", "cli"):  # both name the version
            yield f"{importer} imports the whole package"
    elif own != other and LEVEL[own] <= LEVEL[other]:
        yield f"{importer} imports {imported}, which does not stand below it"


def test_every_module_has_a_layer_and_every_layer_a_module() -> None:
    tops = {module_name(path).split(".")[0] for path in SOURCES} - {""}
    assert tops == LEVEL.keys()


@pytest.mark.parametrize("path", SOURCES, ids=[module_name(path) or "gpfl" for path in SOURCES])
def test_imports_point_one_way(path: Path) -> None:
    importer = module_name(path)
    wrong = [rule for imported in imports(path) for rule in broken_rules(importer, imported)] if importer else []
    assert wrong == []


def test_rule_of_imports_finds_what_breaks_it() -> None:
    assert list(broken_rules("net", "method")) == ["net imports method, which does not stand below it"]
    assert list(broken_rules("methods.fedavg", "engine.loop")) != []
    assert list(broken_rules("runs", "")) == ["runs imports the whole package"]
    assert list(broken_rules("engine.loop", "engine.base")) == []


def test_only_main_imports_the_command() -> None:
    assert [module_name(path) for path in SOURCES if "cli" in imports(path)] == ["__main__"]


def test_methods_know_nothing_of_clients_engines_and_data() -> None:
    allowed = {"errors", "losses", "method", "methods", "net", "options", "randomness", "tree"}
    for path in (ROOT / "methods").glob("*.py"):
        assert {name.split(".")[0] for name in imports(path)} <= allowed, path


def public_definitions(tree: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Functions and classes at the top of a file, and methods of its classes, whose names do not begin with _."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node, f"{node.name}.")


@pytest.mark.parametrize("path", SOURCES, ids=[module_name(path) or "gpfl" for path in SOURCES])
def test_everything_public_says_what_it_is(path: Path) -> None:
    source = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(source), f"{path} has no docstring"
    for name, node in public_definitions(source):
        words = ast.get_docstring(node)  # type: ignore[arg-type]
        assert words, f"{path.name}: {name} has no docstring"


def test_everything_exported_exists() -> None:
    assert sorted(gpfl.__all__) == sorted(set(gpfl.__all__))
    assert all(hasattr(gpfl, name) for name in gpfl.__all__)


def dangerous(source: ast.Module) -> Iterator[str]:
    """Ways to run code that lies in a file, or in a text."""
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


@pytest.mark.parametrize("path", SOURCES, ids=[module_name(path) or "gpfl" for path in SOURCES])
def test_nothing_is_unpickled_or_executed(path: Path) -> None:
    found = list(dangerous(ast.parse(path.read_text(encoding="utf-8"))))
    if module_name(path) == "data.own.pickled":  # it reads dicts and arrays alone; tests/own/test_pickled.py tries to break it
        found = [word for word in found if word != "pickle"]
    assert found == []


def test_rule_of_danger_finds_what_breaks_it() -> None:
    text = "import pickle\nfrom pickle import load\nx = torch.load(f)\ny = read(f, allow_pickle=True)\nz = eval(t)\n"
    assert sorted(dangerous(ast.parse(text))) == ["allow_pickle", "eval", "pickle", "pickle", "torch.load"]


def test_global_generators_are_not_drawn_from() -> None:
    birthplaces = {"randomness"}
    for path in SOURCES:
        if module_name(path) in birthplaces:
            continue
        calls = {ast.unparse(n.func) for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)}
        loose = {"torch.manual_seed", "torch.rand", "torch.randperm", "np.random.seed", "np.random.rand", "random.random"}
        assert not calls & loose, path
        assert not any(call.startswith("np.random.default_rng") for call in calls), path


RECORDS = {
    **{f"method {name}": record for name, record in METHODS.items()},
    **{f"split {name}": record for name, record in PARTITIONS.items()},
    **{f"net {name}": record for name, record in NETS.items()},
    "run": RunOptions,
    "train": TrainOptions,
    "defence": DefenceConfig,
}


@pytest.mark.parametrize("name", RECORDS)
def test_every_option_has_words_and_a_default_within_its_limits(name: str) -> None:
    record = RECORDS[name]
    defaults = {f.name: f.default for f in dataclasses.fields(record)}
    for key, described in options_of(record).items():
        assert len(described.doc) > 5, key
        assert not described.doc.endswith("."), f"{key}: the sentence goes on with its default"
        by_net = isinstance(defaults[key], float) and defaults[key] != defaults[key]
        assert by_net or described.admits(defaults[key]), key
        assert flags.describe(record, key)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_every_method_has_a_file_and_words_of_its_own(method: type) -> None:
    assert method.__module__ == f"gpfl.methods.{method.name}"
    assert method.__doc__
    assert "\n" in method.__doc__, "its paper and its deviations"


def test_every_key_has_one_flag_and_every_flag_one_key() -> None:
    names = [flags.flag_name(section, key) for section in flags.RECORDS for key in flags.keys_of(section)]
    assert len(names) == len(set(names))
