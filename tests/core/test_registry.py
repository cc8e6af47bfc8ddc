"""Registries list and describe what they hold without importing it."""

from __future__ import annotations

import pytest

from gpfl.core.registry import Registry
from gpfl.data import DATASETS
from gpfl.engine import ENGINES
from gpfl.federation import PARTITIONS
from gpfl.methods import METHODS
from gpfl.models import NETS

REGISTRIES = {"methods": METHODS, "data": DATASETS, "partitions": PARTITIONS, "nets": NETS, "engines": ENGINES}


@pytest.mark.parametrize("registry", REGISTRIES.values(), ids=REGISTRIES)
def test_summaries_from_source_are_those_of_the_objects(registry: Registry[object]) -> None:
    from_source = Registry(registry.package, registry.paths).summaries()
    for name, value in registry.items():
        documented = (value.__doc__ or "").splitlines()[0] if isinstance(value, type) else value.description  # type: ignore[attr-defined]
        assert from_source[name] == documented
        assert len(from_source[name]) > 10
    assert registry.summaries() == from_source


@pytest.mark.parametrize("registry", [METHODS, DATASETS, PARTITIONS, ENGINES])
def test_names_are_those_of_the_objects(registry: Registry[object]) -> None:
    assert {name: value.name for name, value in registry.items()} == {name: name for name in registry}  # type: ignore[attr-defined]


def test_objects_are_added_replaced_and_removed() -> None:
    registry: Registry[object] = Registry("gpfl.methods", {"gpfl": "gpfl:GPFL", "local": "local:Local"})
    registry["mine"] = dict
    registry["local"] = list
    assert list(registry) == ["gpfl", "local", "mine"]
    assert registry["local"] is list
    assert registry["gpfl"] is METHODS["gpfl"]
    del registry["gpfl"]
    assert "gpfl" not in registry
    assert len(registry) == 2
    with pytest.raises(KeyError):
        registry["gpfl"]
