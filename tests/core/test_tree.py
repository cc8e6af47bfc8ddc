from __future__ import annotations

import pytest
import torch

from gpfl.core import tree
from gpfl.core.tree import Tree


def sample(value: float = 0.0) -> Tree:
    return {
        "base": {"w": torch.arange(4.0).reshape(2, 2) + value, "deep": {"b": torch.ones(2) * value}},
        "t": torch.tensor(float(value)),
    }


def equal(a: Tree, b: Tree) -> bool:
    left, right = tree.flatten(a), tree.flatten(b)
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def test_unflatten_inverts_flatten() -> None:
    assert list(tree.flatten(sample())) == ["base/w", "base/deep/b", "t"]
    assert equal(tree.unflatten(tree.flatten(sample(2))), sample(2))


def test_map_leaves_matches_trees_by_name_not_by_order() -> None:
    first: Tree = {"a": torch.tensor(1.0), "b": {"c": torch.tensor(2.0)}}
    other: Tree = {"b": {"c": torch.tensor(20.0)}, "a": torch.tensor(10.0)}
    assert equal(tree.map_leaves(torch.add, first, other), {"a": torch.tensor(11.0), "b": {"c": torch.tensor(22.0)}})


def test_pick_and_drop_partition_a_tree() -> None:
    picked, rest = tree.pick(sample(), ("base", "absent")), tree.drop(sample(), ("base", "absent"))
    assert (list(picked), list(rest)) == (["base"], ["t"])
    assert equal({**picked, **rest}, sample())


def test_a_tensor_is_not_a_branch_and_a_branch_is_not_a_tensor() -> None:
    with pytest.raises(TypeError, match="'t' is a tensor"):
        tree.branch(sample(), "t")
    with pytest.raises(TypeError, match="'base' is a subtree"):
        tree.leaf(sample(), "base")
    assert torch.equal(tree.leaf(tree.branch(sample(), "base"), "w"), torch.tensor([[0.0, 1.0], [2.0, 3.0]]))


def test_take_returns_the_stacked_trees() -> None:
    stacked = tree.stack([sample(1), sample(2), sample(3)])
    assert equal(tree.take(stacked, 1), sample(2))
    assert equal(tree.take(stacked, torch.tensor([2, 0])), tree.stack([sample(3), sample(1)]))
    assert equal(tree.concatenate([tree.take(stacked, slice(0, 2)), tree.take(stacked, slice(2, 3))]), stacked)


def test_repeat_copies_memory() -> None:
    one = sample(1)
    repeated = tree.repeat(one, 2)
    assert equal(repeated, tree.stack([one, one]))
    tree.leaf(repeated, "t")[0] = 9.0
    assert tree.leaf(repeated, "t").tolist() == [9.0, 1.0]
    assert equal(one, sample(1))


def test_index_copy_writes_the_given_entries_only() -> None:
    stacked = tree.stack([sample(1), sample(2), sample(3)])
    tree.index_copy_(stacked, torch.tensor([2, 0]), tree.stack([sample(30), sample(10)]))
    assert equal(stacked, tree.stack([sample(10), sample(2), sample(30)]))


def test_index_copy_matches_trees_by_name_not_by_order() -> None:
    stacked: Tree = {"a": torch.zeros(2), "b": torch.zeros(2)}
    tree.index_copy_(stacked, torch.tensor([1]), {"b": torch.tensor([2.0]), "a": torch.tensor([1.0])})
    assert equal(stacked, {"a": torch.tensor([0.0, 1.0]), "b": torch.tensor([0.0, 2.0])})
    with pytest.raises(KeyError, match="'a'"):
        tree.index_copy_(stacked, torch.tensor([1]), {"b": torch.tensor([2.0])})


def test_count_bytes_sums_all_leaves() -> None:
    assert tree.count_bytes(sample()) == (4 + 2 + 1) * 4


def test_clone_copies_memory() -> None:
    one = sample(1)
    other = tree.clone(one)
    assert equal(one, other)
    tree.leaf(other, "t").add_(1)
    assert equal(one, sample(1))


def test_lerp_goes_from_the_first_tree_to_the_second() -> None:
    assert equal(tree.lerp(sample(0), sample(4), torch.tensor(0.25)), sample(1))
    assert equal(tree.lerp(sample(0), sample(4), torch.tensor(0.0)), sample(0))


def test_is_finite_finds_nan_and_infinity_in_any_leaf() -> None:
    assert tree.is_finite(sample())
    for value in (float("nan"), float("inf")):
        broken = sample()
        tree.leaf(tree.branch(tree.branch(broken, "base"), "deep"), "b")[1] = value
        assert not tree.is_finite(broken)
