"""How a round is executed. All engines compute the same numbers; `auto` picks one by device, net and federation."""

from gpfl.core.precision import matmul_precision
from gpfl.engine.base import Engine, RunSpec
from gpfl.engine.selection import ENGINES, limit_threads, make_engine

__all__ = ["ENGINES", "Engine", "RunSpec", "limit_threads", "make_engine", "matmul_precision"]
