"""Packing: every client once, no slot busy longer than it must be, and slots that change hands at the right time."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from gpfl.engine.packing import OVERHEAD, best_width, pack

CASES = [
    ([3], 1),
    ([5, 5, 5, 5], 2),
    ([4, 3, 3, 2], 2),
    ([7, 1, 1, 1, 1], 3),
    ([2, 9, 4, 4, 1, 6], 3),
    ([1, 2], 4),
    ([3, 3, 2, 2, 2], 2),  # the longest first is not the best here
]
cases = pytest.mark.parametrize(("lengths", "slots"), CASES, ids=str)


def fewest_steps(lengths: list[int], slots: int) -> int:
    """The steps of the best of all ways to give clients to slots."""
    ways = product(range(slots), repeat=len(lengths))
    return min(max(sum(n for n, slot in zip(lengths, way, strict=True) if slot == s) for s in range(slots)) for way in ways)


def own_rows(lengths: list[int], width: int = 3) -> list[np.ndarray]:
    """Rows that tell the client and the step: 100 × client + step."""
    return [np.repeat(100 * client + np.arange(n)[:, None], width, axis=1) for client, n in enumerate(lengths)]


@cases
def test_every_client_is_in_exactly_one_slot(lengths: list[int], slots: int) -> None:
    packing = pack(lengths, slots)
    assert len(packing.slots) == slots
    assert sorted(client for slot in packing.slots for client in slot) == list(range(len(lengths)))


@cases
def test_steps_are_those_of_the_fullest_slot_and_near_the_fewest(lengths: list[int], slots: int) -> None:
    packing = pack(lengths, slots)
    assert packing.steps == max(sum(lengths[client] for client in slot) for slot in packing.slots)
    fewest = fewest_steps(lengths, slots)
    assert fewest <= packing.steps <= fewest * (4 / 3 - 1 / (3 * slots)) + 1e-9  # Graham's bound
    if lengths != [3, 3, 2, 2, 2]:
        assert packing.steps == fewest


@cases
def test_plan_has_the_rows_of_every_step_once_and_is_empty_elsewhere(lengths: list[int], slots: int) -> None:
    packing, rows = pack(lengths, slots), own_rows(lengths)
    plan = packing.plan(rows)
    assert plan.shape == (slots, packing.steps, 3)
    assert sorted(plan[plan >= 0].tolist()) == sorted(np.concatenate(rows).ravel().tolist())
    assert (plan < 0).sum() == 3 * (slots * packing.steps - sum(lengths))


def test_plan_is_as_wide_as_its_widest_steps() -> None:
    plan = pack([1, 1], 2).plan([np.array([[4, 5]]), np.array([[7, 8, 9]])])
    assert sorted(plan[:, 0].tolist()) == [[4, 5, -1], [7, 8, 9]]


@cases
def test_replaying_the_changes_gives_every_client_its_steps_in_order(lengths: list[int], slots: int) -> None:
    packing, rows = pack(lengths, slots), own_rows(lengths, 1)
    plan, changes = packing.plan(rows), dict(packing.changes())
    assert list(changes) == sorted(changes)
    holder, seen, gone = [-1] * slots, [[] for _ in lengths], []
    for now in range(packing.steps + 1):
        for slot, leaves, enters in changes.get(now, []):
            assert holder[slot] == leaves
            gone += [leaves] if leaves >= 0 else []
            holder[slot] = enters
        for slot in range(slots if now < packing.steps else 0):
            assert (holder[slot] == -1) == (plan[slot, now, 0] == -1)
            if holder[slot] >= 0:
                seen[holder[slot]].append(plan[slot, now, 0])
    assert holder == [-1] * slots
    assert sorted(gone) == list(range(len(lengths)))
    assert [list(steps) for steps in seen] == [part.ravel().tolist() for part in rows]


@pytest.mark.parametrize(
    ("lengths", "most", "width"),
    [
        ([10], 64, 1),
        ([10] * 20, 64, 20),
        ([10] * 20, 5, 5),
        ([30, 10, 10, 10], 64, 2),  # the three others fit beside the first, one after another
        ([100, 1, 1, 1, 1, 1], 64, 1),  # a second slot would cost more than it saves
    ],
)
def test_width_is_that_in_which_clients_finish_soonest(lengths: list[int], most: int, width: int) -> None:
    assert best_width(lengths, most) == width
    time = {w: pack(lengths, w).steps * (OVERHEAD + w) for w in range(1, min(most, len(lengths)) + 1)}
    assert time[width] == min(time.values())
