"""Every client is in one slot, slots are evenly filled, and clients are swapped at the right steps."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from gpfl.engine.slots import STEP_OVERHEAD, fastest_slot_count, pack

CASES = [
    ([3], 1),
    ([5, 5, 5, 5], 2),
    ([4, 3, 3, 2], 2),
    ([7, 1, 1, 1, 1], 3),
    ([2, 9, 4, 4, 1, 6], 3),
    ([1, 2], 4),
    ([3, 3, 2, 2, 2], 2),  # assigning the longest first is not optimal here
]
cases = pytest.mark.parametrize(("lengths", "slots"), CASES, ids=str)


def fewest_steps(lengths: list[int], slots: int) -> int:
    """Return the number of steps of the best of all assignments."""
    assignments = product(range(slots), repeat=len(lengths))
    return min(
        max(sum(n for n, slot in zip(lengths, assigned, strict=True) if slot == s) for s in range(slots))
        for assigned in assignments
    )


def numbered_batches(lengths: list[int], width: int = 3) -> list[np.ndarray]:
    """Return batches of the numbers 100 × client + step."""
    return [np.repeat(100 * client + np.arange(n)[:, None], width, axis=1) for client, n in enumerate(lengths)]


@cases
def test_every_client_is_in_exactly_one_slot(lengths: list[int], slots: int) -> None:
    packing = pack(lengths, slots)
    assert len(packing.slots) == slots
    assert sorted(client for slot in packing.slots for client in slot) == list(range(len(lengths)))


@cases
def test_steps_are_those_of_the_fullest_slot_and_close_to_optimal(lengths: list[int], slots: int) -> None:
    packing = pack(lengths, slots)
    assert packing.steps == max(sum(lengths[client] for client in slot) for slot in packing.slots)
    fewest = fewest_steps(lengths, slots)
    assert fewest <= packing.steps <= fewest * (4 / 3 - 1 / (3 * slots)) + 1e-9  # Graham's bound
    if lengths != [3, 3, 2, 2, 2]:
        assert packing.steps == fewest


@cases
def test_plan_has_every_batch_once_and_padding_elsewhere(lengths: list[int], slots: int) -> None:
    packing, batches = pack(lengths, slots), numbered_batches(lengths)
    plan = packing.plan(batches)
    assert plan.shape == (slots, packing.steps, 3)
    assert sorted(plan[plan >= 0].tolist()) == sorted(np.concatenate(batches).ravel().tolist())
    assert (plan < 0).sum() == 3 * (slots * packing.steps - sum(lengths))


def test_plan_is_as_wide_as_its_widest_steps() -> None:
    plan = pack([1, 1], 2).plan([np.array([[4, 5]]), np.array([[7, 8, 9]])])
    assert sorted(plan[:, 0].tolist()) == [[4, 5, -1], [7, 8, 9]]


@cases
def test_replaying_the_swaps_gives_every_client_its_steps_in_order(lengths: list[int], slots: int) -> None:
    packing, batches = pack(lengths, slots), numbered_batches(lengths, 1)
    plan, swaps = packing.plan(batches), dict(packing.swaps())
    assert list(swaps) == sorted(swaps)
    current, steps, finished = [-1] * slots, [[] for _ in lengths], []
    for now in range(packing.steps + 1):
        for slot, leaving, entering in swaps.get(now, []):
            assert current[slot] == leaving
            finished += [leaving] if leaving >= 0 else []
            current[slot] = entering
        for slot in range(slots if now < packing.steps else 0):
            assert (current[slot] == -1) == (plan[slot, now, 0] == -1)
            if current[slot] >= 0:
                steps[current[slot]].append(plan[slot, now, 0])
    assert current == [-1] * slots
    assert sorted(finished) == list(range(len(lengths)))
    assert [list(of_client) for of_client in steps] == [part.ravel().tolist() for part in batches]


@pytest.mark.parametrize(
    ("lengths", "most", "count"),
    [
        ([10], 64, 1),
        ([10] * 20, 64, 20),
        ([10] * 20, 5, 5),
        ([30, 10, 10, 10], 64, 2),  # the three short clients fit in one slot, one after another
        ([100, 1, 1, 1, 1, 1], 64, 1),  # a second slot would cost more than it saves
    ],
)
def test_slot_count_is_that_with_which_clients_finish_soonest(lengths: list[int], most: int, count: int) -> None:
    counts = range(1, min(most, len(lengths)) + 1)
    assert fastest_slot_count(lengths, counts) == count
    times = {count: pack(lengths, count).steps * (STEP_OVERHEAD + count) for count in counts}
    assert times[count] == min(times.values())
