"""What a search has chosen: configs and settings that run it."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import cast

from gpfl import api, toml
from gpfl import config as configs
from gpfl.config import Given
from gpfl.federation import MANIFEST
from gpfl.study.trials import NEGLIGIBLE
from gpfl.study.tune import STUDY, Plan, Tuned, plan_all, read_candidates


def held_beside(found: Sequence[Tuned], given: Given) -> list[Tuned]:
    """Gives the searches of other methods that the folder holds, as far as they went."""
    plan = found[0].plan
    others: list[Tuned] = []
    for path in sorted(plan.out.glob(f"*/{STUDY}")):
        name = path.parent.name
        if name in {tuned.plan.method for tuned in found}:
            continue
        before = cast(Given, toml.read(path))
        own = {
            key: value for key, value in before["method"].items() if f"method.{key}" not in before["space"] and key != "name"
        }
        [other] = plan_all(given, [name], {name: own}, plan.search, plan.out)
        candidates = [candidate for candidate in read_candidates(other) if candidate.done]
        if candidates:
            others.append(Tuned(other, candidates))
    return others


def best_config(tuned: Tuned) -> str:
    """Gives the config of the best candidate: what it needs to be run, without seed and device."""
    given = tuned.plan.sections(tuned.best.values)
    content = settled(tuned.plan, given, f"../{MANIFEST}")
    content["method"] = {key: content["method"][key] for key in ("name", *given["method"]) if key in content["method"]}
    return toml.dump(content)


def common_config(tuned: Tuned) -> Given:
    """Gives the config that all methods of a search share."""
    content = settled(tuned.plan, tuned.plan.given, MANIFEST)
    return {section: values for section, values in content.items() if section != "method"}


def settled(plan: Plan, given: Given, manifest: str) -> Given:
    """Gives the complete config of a candidate, but of [run] only what was given and matters to its numbers."""
    complete, _ = api.prepare(configs.resolve(given), plan.federation, None, None)
    content: Given = tomllib.loads(complete.to_toml())
    if "file" in content["split"]:
        content["split"]["file"] = manifest
    content["run"] = {key: value for key, value in given.get("run", {}).items() if ("run", key) not in NEGLIGIBLE}
    return {section: values for section, values in content.items() if values}


def assignments(tuned: Tuned) -> list[str]:
    """Gives the method's chosen values as `gpfl compare` takes them: gpfl.lam=0.01."""
    given = tuned.plan.sections(tuned.best.values)["method"]
    return [f"{tuned.plan.method}.{key}={toml.value_text(value)}" for key, value in given.items() if key != "name"]
