"""How a round is executed. All engines compute the same numbers; `auto` picks one by device, net and federation."""

from typing import TYPE_CHECKING

from gpfl.core.registry import Registry, lazy_attributes

if TYPE_CHECKING:
    from gpfl.core.precision import matmul_precision as matmul_precision
    from gpfl.engine.base import Engine as Engine
    from gpfl.engine.base import RunSpec as RunSpec
    from gpfl.engine.selection import limit_threads as limit_threads
    from gpfl.engine.selection import make_engine as make_engine

ENGINES: Registry[type["Engine"]] = Registry(
    "gpfl.engine", {"loop": "base:Loop", "vmap": "vmap:Vmap", "workers": "workers:Workers"}
)

if not TYPE_CHECKING:
    __getattr__ = lazy_attributes(
        "gpfl.engine",
        {
            **dict.fromkeys(("Engine", "RunSpec"), "gpfl.engine.base"),
            **dict.fromkeys(("limit_threads", "make_engine"), "gpfl.engine.selection"),
            "matmul_precision": "gpfl.core.precision",
        },
    )
