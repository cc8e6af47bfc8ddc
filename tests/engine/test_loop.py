"""A round of the plain engine can be read from start to end in nine files.

In the order in which a round of GPFL enters them:

1. `engine/base.py`              request, aggregation weights, what a client knows; client after client
2. `core/method.py`              the method interface and a step of SGD
3. `engine/aggregator.py`        the mean of the uploads
4. `core/tree.py`                arithmetic on states
5. `core/local_round.py`         batches, and one client's download, steps and upload
6. `core/randomness.py`          the generator of (seed, purpose, round, client)
7. `methods/factored_valve.py`   how a round trains the valve
8. `methods/gpfl.py`             the method
9. `core/net.py`                 the net's parts with a client's weights
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

from conftest import toy_federation

import gpfl
from gpfl.core import tree
from gpfl.training.result import Result

PACKAGE = Path(gpfl.__file__).parent
FILES = [
    "engine/base.py",
    "core/method.py",
    "engine/aggregator.py",
    "core/tree.py",
    "core/local_round.py",
    "core/randomness.py",
    "methods/factored_valve.py",
    "methods/gpfl.py",
    "core/net.py",
]


def files_of_a_round(result: Result) -> list[str]:
    """Return the files of the package that one round executes, in the order in which it enters them."""
    engine = result.engine
    shared, private = engine.method.init(0)
    clients = range(len(engine.federation))
    private = tree.repeat(private, len(clients))
    files: dict[str, None] = {}

    def trace(frame: FrameType, event: str, arg: object) -> None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            files[path.relative_to(PACKAGE).as_posix()] = None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        engine.train(shared, private, clients, 0)
    finally:
        sys.settrace(before)
    return list(files)


def test_a_round_of_gpfl_passes_nine_files() -> None:
    result = gpfl.fit("gpfl", toy_federation(), net="mlp", rounds=1, engine="loop")
    assert files_of_a_round(result) == FILES
