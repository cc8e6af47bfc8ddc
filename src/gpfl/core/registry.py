"""Methods, datasets and the like by name, imported when they are looked up: listing them imports nothing, not even torch."""

import ast
import sys
from collections import UserDict
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar, cast

T = TypeVar("T")


class Registry(UserDict[str, T]):
    """Objects by name; those given as "module:attribute", with the module's name below `package`, are imported on first use."""

    def __init__(self, package: str, paths: Mapping[str, str]) -> None:
        super().__init__(cast(Mapping[str, T], paths))
        self.package, self.paths = package, paths

    def __getitem__(self, name: str) -> T:
        """Return an object, imported if it was not yet."""
        value = self.data[name]
        if isinstance(value, str):
            module, attribute = value.split(":")
            self.data[name] = getattr(import_module(f"{self.package}.{module}"), attribute)
        return self.data[name]

    def summaries(self) -> dict[str, str]:
        """Return a one-line summary of each object by name: the first line of a class's docstring, or its `description`.

        The source of modules that are not imported yet is parsed instead of importing them.
        """
        return {name: self._summary(name) for name in self}

    def _summary(self, name: str) -> str:
        value = self.data[name]
        if not isinstance(value, str):
            return (value.__doc__ or "").splitlines()[0] if isinstance(value, type) else str(getattr(value, "description", ""))
        module, attribute = value.split(":")
        folder = Path(str(sys.modules[self.package].__file__)).parent
        source = folder.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8")
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and node.name == attribute:
                return (ast.get_docstring(node) or "").splitlines()[0]
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == attribute and isinstance(node.value, ast.Call):
                return next(str(ast.literal_eval(each.value)) for each in node.value.keywords if each.arg == "description")
        raise AttributeError(f"{self.package}.{module} defines no {attribute}")


def lazy_attributes(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """Return a package's `__getattr__`, which imports a name from its module, or a submodule, on first use."""

    def get_attribute(name: str) -> object:
        value: object
        if name in modules:
            value = getattr(import_module(modules[name]), name)
        elif not name.startswith("_") and find_spec(f"{package}.{name}"):
            value = import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        setattr(sys.modules[package], name, value)
        return value

    return get_attribute
