"""How the steps of an attack are run: traced on a CPU, on a GPU as they are, or as a captured graph where it is asked for."""

from __future__ import annotations

from gpfl.core.tree import Tree, device_of
from gpfl.engine.compiler.program import Buffers, Function, Program

FEW = 50
"""Iterations for which tracing a step is not worth its time."""


def program(advance: Function, state: Tree, fixed: Buffers, iterations: int, graph: bool) -> Program:
    """Gives the program of a step; where no graph can be captured its operations are called."""
    device = device_of(state)
    on_gpu = device is not None and device.type == "cuda"
    return Program(advance, state, fixed, traced=iterations > FEW and (graph or not on_gpu))
