"""L-BFGS for many problems at once: each has its own history and line search, all are evaluated together.

Every call evaluates each problem at one trial point. Where the value has fallen enough (Armijo) the point is taken, the
history grows and a new direction is tried at full length; where not, the same direction is tried at half the length.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gpfl.core import tree
from gpfl.core.tree import Tree

Evaluate = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Gives slopes (problems, entries) and values (problems,) at points (problems, entries)."""

HISTORY = 10
ENOUGH = 1e-4
"""The share of the fall that the slope promises which a step must bring."""
SHORTEST = 1e-6
"""A step that was halved to this length of its direction gives up its history and goes down the slope."""
CURVED = 1e-10


def begin(point: Tensor, evaluate: Evaluate) -> Tree:
    """Gives the state at the start: steepest descent, the first step no longer than one."""
    slope, value = evaluate(point)
    past = torch.zeros(HISTORY, *point.shape, device=point.device)
    return {
        "point": point.clone(),
        "value": value,
        "slope": slope,
        "direction": -slope,
        "length": first_length(slope),
        "steps": past,
        "turns": past.clone(),
    }


def advance(state: Tree, evaluate: Evaluate) -> Tree:
    """Gives the state after one evaluation of every problem."""
    point, value, slope, direction, length = (
        tree.leaf(state, name) for name in ("point", "value", "slope", "direction", "length")
    )
    trial = point + length[:, None] * direction
    new_slope, new_value = evaluate(trial)
    promised = ENOUGH * length * inner(slope, direction)
    taken = torch.isfinite(new_value) & torch.isfinite(new_slope).all(-1) & (new_value <= value + promised)
    step, turn = trial - point, new_slope - slope
    curved = taken & (inner(step, turn) > CURVED * inner(turn, turn).clamp_min(1e-30))
    lost = ~taken & (length < SHORTEST * first_length(direction).clamp_max(1.0))
    steps = pushed(tree.leaf(state, "steps"), step, curved, lost)
    turns = pushed(tree.leaf(state, "turns"), turn, curved, lost)
    point, value, slope = (
        choose(taken, trial, point),
        torch.where(taken, new_value, value),
        choose(taken, new_slope, slope),
    )
    newton = -multiply(steps, turns, slope)
    uphill = inner(newton, slope) >= 0
    fresh = choose(uphill | lost, -slope, newton)
    full = torch.where(uphill | lost, first_length(slope), torch.ones_like(length))
    return {
        "point": point,
        "value": value,
        "slope": slope,
        "direction": choose(taken | lost, fresh, direction),
        "length": torch.where(taken | lost, full, length / 2),
        "steps": steps,
        "turns": turns,
    }


def multiply(steps: Tensor, turns: Tensor, slope: Tensor) -> Tensor:
    """Gives the slopes times the inverse curvature that the history tells (the two-loop recursion); gaps in it are skipped."""
    curvature = inner(steps, turns)  # (history, problems)
    weight = torch.where(curvature > 0, 1 / curvature.clamp_min(1e-38), torch.zeros_like(curvature))
    out, along = slope, []
    for k in reversed(range(HISTORY)):
        along.append(weight[k] * inner(steps[k], out))
        out = out - along[-1][:, None] * turns[k]
    last = inner(turns[-1], turns[-1])
    out = torch.where(last > 0, curvature[-1] / last.clamp_min(1e-38), torch.ones_like(last))[:, None] * out
    for k in range(HISTORY):
        back = weight[k] * inner(turns[k], out)
        out = out + (along[HISTORY - 1 - k] - back)[:, None] * steps[k]
    return out


def pushed(past: Tensor, entry: Tensor, where: Tensor, lost: Tensor) -> Tensor:
    """Gives histories (history, problems, entries) with an entry at the end of some, and none in those that are lost."""
    longer = torch.cat([past[1:], entry[None]])
    return torch.where(lost[None, :, None], torch.zeros_like(past), torch.where(where[None, :, None], longer, past))


def inner(a: Tensor, b: Tensor) -> Tensor:
    """Gives inner products over the last axis."""
    return (a * b).sum(-1)


def choose(where: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Gives a's rows where a mask (problems,) says so, b's elsewhere."""
    return torch.where(where[:, None], a, b)


def first_length(slope: Tensor) -> Tensor:
    """Gives the step down a slope that moves no further than one in all entries together."""
    return (1 / slope.abs().sum(-1).clamp_min(1e-30)).clamp_max(1.0)
