"""L-BFGS for many problems at once: each has its own history and line search, all are evaluated together.

Every step evaluates each problem at one trial point. If the value has decreased enough (Armijo), the point is accepted, the
history grows and a new direction is tried at full length; otherwise the same direction is tried at half the length.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from gpfl.core import tree
from gpfl.core.tree import Tree

Evaluate = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Returns gradients (problems, entries) and values (problems,) at points (problems, entries)."""

HISTORY = 10
_SUFFICIENT_DECREASE = 1e-4  # fraction of the decrease that the gradient predicts which a step must reach
_SHORTEST_STEP = 1e-6  # relative step length below which a problem drops its history and restarts with steepest descent
_MIN_CURVATURE = 1e-10


def init(point: Tensor, evaluate: Evaluate) -> Tree:
    """Return the initial state: steepest descent, with a first step no longer than one."""
    grad, value = evaluate(point)
    history = torch.zeros(HISTORY, *point.shape, device=point.device)
    return {
        "point": point.clone(),
        "value": value,
        "grad": grad,
        "direction": -grad,
        "length": _first_length(grad),
        "point_changes": history,
        "grad_changes": history.clone(),
    }


def step(state: Tree, evaluate: Evaluate) -> Tree:
    """Return the state after one evaluation of every problem."""
    names = ("point", "value", "grad", "direction", "length", "point_changes", "grad_changes")
    point, value, grad, direction, length, point_changes, grad_changes = (tree.leaf(state, name) for name in names)
    trial = point + length[:, None] * direction
    new_grad, new_value = evaluate(trial)
    predicted = _SUFFICIENT_DECREASE * length * _dot(grad, direction)
    accepted = torch.isfinite(new_value) & torch.isfinite(new_grad).all(-1) & (new_value <= value + predicted)
    point_change, grad_change = trial - point, new_grad - grad
    curvature = _dot(point_change, grad_change)
    curved = accepted & (curvature > _MIN_CURVATURE * _dot(grad_change, grad_change).clamp_min(1e-30))
    restart = ~accepted & (length < _SHORTEST_STEP * _first_length(direction).clamp_max(1.0))
    point_changes = _push(point_changes, point_change, curved, restart)
    grad_changes = _push(grad_changes, grad_change, curved, restart)
    point, grad = _select(accepted, trial, point), _select(accepted, new_grad, grad)
    newton = -_apply_inverse_hessian(point_changes, grad_changes, grad)
    steepest = (_dot(newton, grad) >= 0) | restart
    first_length = torch.where(steepest, _first_length(grad), torch.ones_like(length))
    return {
        "point": point,
        "value": torch.where(accepted, new_value, value),
        "grad": grad,
        "direction": _select(accepted | restart, _select(steepest, -grad, newton), direction),
        "length": torch.where(accepted | restart, first_length, length / 2),
        "point_changes": point_changes,
        "grad_changes": grad_changes,
    }


def _apply_inverse_hessian(point_changes: Tensor, grad_changes: Tensor, grad: Tensor) -> Tensor:
    """Return the gradients times the approximate inverse Hessian (the two-loop recursion); gaps in the history are skipped."""
    curvature = _dot(point_changes, grad_changes)  # (history, problems)
    weight = torch.where(curvature > 0, 1 / curvature.clamp_min(1e-38), torch.zeros_like(curvature))
    out, coefficients = grad, []
    for k in reversed(range(HISTORY)):
        coefficients.append(weight[k] * _dot(point_changes[k], out))
        out = out - coefficients[-1][:, None] * grad_changes[k]
    last = _dot(grad_changes[-1], grad_changes[-1])
    out = torch.where(last > 0, curvature[-1] / last.clamp_min(1e-38), torch.ones_like(last))[:, None] * out
    for k in range(HISTORY):
        back = weight[k] * _dot(grad_changes[k], out)
        out = out + (coefficients[HISTORY - 1 - k] - back)[:, None] * point_changes[k]
    return out


def _push(history: Tensor, entry: Tensor, where: Tensor, restart: Tensor) -> Tensor:
    """Return histories (history, problems, entries) with an entry appended where a mask is set, and cleared on a restart."""
    longer = torch.cat([history[1:], entry[None]])
    return torch.where(restart[None, :, None], torch.zeros_like(history), torch.where(where[None, :, None], longer, history))


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1)


def _select(where: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(where[:, None], a, b)


def _first_length(grad: Tensor) -> Tensor:
    """Return the length of a steepest-descent step whose entries move by at most one in total."""
    return (1 / grad.abs().sum(-1).clamp_min(1e-30)).clamp_max(1.0)
