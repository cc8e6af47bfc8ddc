"""How a round of a cohort is executed. Every engine gives the same numbers; `auto` picks by device, net and cohort."""

from gpfl.engine.base import Engine, RunSpec
from gpfl.engine.precision import exactness, products_in
from gpfl.engine.selection import ENGINES, limit_threads, make_engine

__all__ = ["ENGINES", "Engine", "RunSpec", "make_engine", "exactness", "limit_threads", "products_in"]
