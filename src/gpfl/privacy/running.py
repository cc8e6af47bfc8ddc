"""How the steps of an attack are run: traced on a CPU, on a GPU as they are, or as a captured graph where it is asked for."""

from __future__ import annotations

from gpfl.engine.program import Buffers, Function, Program
from gpfl.tree import Tree, device_of

FEW = 50
"""Iterations for which tracing a step is not worth its time."""


def program(advance: Function, state: Tree, fixed: Buffers, iterations: int, graph: bool) -> Program:
    """Gives the program of a step; where no graph can be captured it runs as it is."""
    device = device_of(state)
    on_gpu = device is not None and device.type == "cuda"
    if iterations <= FEW or (on_gpu and not graph):
        return Program(advance, state, fixed, traced=False)
    try:
        return Program(advance, state, fixed)
    except RuntimeError:
        if not on_gpu:
            raise
        return Program(advance, state, fixed, traced=False)
