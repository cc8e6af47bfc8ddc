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


def same(a: Tree, b: Tree) -> bool:
    left, right = tree.flatten(a), tree.flatten(b)
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def test_flattening_names_leaves_by_their_path_and_is_undone() -> None:
    assert list(tree.flatten(sample())) == ["base/w", "base/deep/b", "t"]
    assert same(tree.unflatten(tree.flatten(sample(2))), sample(2))


def test_mapping_reads_other_trees_by_name_not_by_order() -> None:
    first: Tree = {"a": torch.tensor(1.0), "b": {"c": torch.tensor(2.0)}}
    other: Tree = {"b": {"c": torch.tensor(20.0)}, "a": torch.tensor(10.0)}
    assert same(tree.map_leaves(torch.add, first, other), {"a": torch.tensor(11.0), "b": {"c": torch.tensor(22.0)}})


def test_picking_and_dropping_divide_a_tree() -> None:
    picked, rest = tree.pick(sample(), ("base", "absent")), tree.drop(sample(), ("base", "absent"))
    assert (list(picked), list(rest)) == (["base"], ["t"])
    assert same({**picked, **rest}, sample())


def test_a_tensor_is_not_a_branch_and_a_branch_is_not_a_tensor() -> None:
    with pytest.raises(TypeError, match="'t' is a tensor"):
        tree.branch(sample(), "t")
    with pytest.raises(TypeError, match="'base' is a subtree"):
        tree.leaf(sample(), "base")
    assert torch.equal(tree.leaf(tree.branch(sample(), "base"), "w"), torch.tensor([[0.0, 1.0], [2.0, 3.0]]))


def test_entries_taken_from_a_stack_are_the_trees_that_went_in() -> None:
    stacked = tree.stack([sample(1), sample(2), sample(3)])
    assert same(tree.take(stacked, 1), sample(2))
    assert same(tree.take(stacked, torch.tensor([2, 0])), tree.stack([sample(3), sample(1)]))
    assert same(tree.concatenate([tree.take(stacked, slice(0, 2)), tree.take(stacked, slice(2, 3))]), stacked)


def test_repeated_trees_are_equal_but_share_no_storage() -> None:
    one = sample(1)
    repeated = tree.repeat(one, 2)
    assert same(repeated, tree.stack([one, one]))
    tree.leaf(repeated, "t")[0] = 9.0
    assert tree.leaf(repeated, "t").tolist() == [9.0, 1.0]
    assert same(one, sample(1))


def test_putting_writes_the_named_entries_and_no_other() -> None:
    stacked = tree.stack([sample(1), sample(2), sample(3)])
    tree.index_copy_(stacked, torch.tensor([2, 0]), tree.stack([sample(30), sample(10)]))
    assert same(stacked, tree.stack([sample(10), sample(2), sample(30)]))


def test_putting_goes_by_name_not_by_order() -> None:
    stacked: Tree = {"a": torch.zeros(2), "b": torch.zeros(2)}
    tree.index_copy_(stacked, torch.tensor([1]), {"b": torch.tensor([2.0]), "a": torch.tensor([1.0])})
    assert same(stacked, {"a": torch.tensor([0.0, 1.0]), "b": torch.tensor([0.0, 2.0])})
    with pytest.raises(KeyError, match="'a'"):
        tree.index_copy_(stacked, torch.tensor([1]), {"b": torch.tensor([2.0])})


def test_bytes_are_those_of_all_leaves() -> None:
    assert tree.count_bytes(sample()) == (4 + 2 + 1) * 4


def test_a_copy_has_memory_of_its_own() -> None:
    one = sample(1)
    other = tree.clone(one)
    assert same(one, other)
    tree.leaf(other, "t").add_(1)
    assert same(one, sample(1))


def test_a_mix_of_trees_goes_from_the_first_to_the_second() -> None:
    assert same(tree.lerp(sample(0), sample(4), torch.tensor(0.25)), sample(1))
    assert same(tree.lerp(sample(0), sample(4), torch.tensor(0.0)), sample(0))


def test_one_nan_or_infinity_anywhere_makes_a_tree_not_finite() -> None:
    assert tree.is_finite(sample())
    for value in (float("nan"), float("inf")):
        broken = sample()
        tree.leaf(tree.branch(tree.branch(broken, "base"), "deep"), "b")[1] = value
        assert not tree.is_finite(broken)
