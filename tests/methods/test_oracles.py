"""Every recorded method, replayed by every engine from the recorded weights, after each of three rounds."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from oracle import Replay, gap, recorded_tree, recording

from gpfl.core import tree
from gpfl.core.method import Method
from gpfl.core.tree import Tree
from gpfl.engine import ENGINES
from gpfl.methods import METHODS

LIMIT = 1e-5
GPFL = {"lam": 0.01, "mu": 0.1}


@dataclass(frozen=True)
class Case:
    """A recording, the method that should reproduce it, and where in a client's private state its recorded part lies."""

    recording: str
    method: Method
    private: str = ""  # the recording's word for private parts: "local" or "personal"
    losses: dict[str, float] = field(default_factory=dict)  # weights of terms in the recorded losses; all once if empty
    evaluated: bool = True  # whether the reference evaluates the model that we do


CASES = [
    Case("fedavg", METHODS["fedavg"]()),
    Case("fedprox", METHODS["fedprox"](mu=0.01), losses={"ce": 1}),
    Case("fedper", METHODS["fedper"](), "local"),
    Case("ditto", METHODS["ditto"](lam=0.1), "personal", losses={"ce": 0.5, "global_ce": 0.5}),
    Case("pfedme", METHODS["pfedme"](), "personal", losses={"ce": 1}, evaluated=False),
    Case("gpfl", METHODS["gpfl"](cond_source="stale_local", **GPFL), "local"),
    Case("gpfl_paper_sum", METHODS["gpfl"](**GPFL), "local"),
    Case("gpfl_paper_mean", METHODS["gpfl"](p_scale="mean", **GPFL), "local"),
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.recording)
def test_recording_is_reproduced_after_each_round(case: Case, engine: str) -> None:
    arrays = recording(case.recording)
    replay = Replay(case.method, engine)
    if case.evaluated:
        check_evaluation(replay, arrays)
    for number in (1, 2, 3):
        terms = replay.advance()
        assert gap(replay.shared, recorded_tree(arrays, f"round{number}/global/")) < LIMIT
        for client in range(4):
            here = f"round{number}/client{client}/"
            if case.private:
                own = private_model(tree.take(replay.private, client))
                assert gap(own, recorded_tree(arrays, f"{here}{case.private}/")) < LIMIT
            check_losses({name: float(value[client]) for name, value in terms.items()}, arrays[f"{here}losses"], case.losses)
            check_contexts(replay, arrays, here, client)
        if case.evaluated:
            check_evaluation(replay, arrays)


def private_model(private: Tree) -> Tree:
    """The private parts of the net, whether they lie open or as a whole model under a name of their own."""
    return tree.branch(private, "personal") if "personal" in private and "head" not in private else private


def check_losses(terms: dict[str, float], losses: np.ndarray, weights: dict[str, float]) -> None:
    chosen = weights or dict.fromkeys(terms, 1.0)
    assert abs(sum(weight * terms[name] for name, weight in chosen.items()) - float(losses.mean())) < LIMIT


def check_contexts(replay: Replay, arrays: dict[str, np.ndarray], here: str, client: int) -> None:
    if f"{here}g" not in arrays:
        return

    facts = replay.engine.client_info(range(4), replay.round).select(client)
    context = replay.method.contexts(replay.shared, tree.take(replay.private, client), facts)  # type: ignore[attr-defined]
    for name in ("g", "p"):
        assert float((context[name] - torch.from_numpy(arrays[f"{here}{name}"])).abs().max()) < LIMIT


def check_evaluation(replay: Replay, arrays: dict[str, np.ndarray]) -> None:
    here = f"round{replay.round}/eval/"
    assert replay.correct() == arrays[f"{here}correct"].tolist()
    assert float((replay.logits() - torch.from_numpy(arrays[f"{here}logits_client0"])).abs().max()) < LIMIT


@pytest.mark.parametrize(
    "wrong", [{"lam": 0.02}, {"mu": 0.0}, {"p_scale": "mean"}, {"mlg_norm": "sample_mean"}, {"reg": "norm"}]
)
def test_recording_tells_a_wrong_gpfl_from_a_right_one(wrong: dict[str, object]) -> None:
    arrays = recording("gpfl_paper_sum")
    replay = Replay(METHODS["gpfl"](**{**GPFL, **wrong}), "vmap")
    replay.advance()
    assert gap(replay.shared, recorded_tree(arrays, "round1/global/")) > 10 * LIMIT


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("evaluated", "word"), [("theta", "theta"), ("local_w", "local_w")])
def test_pfedme_evaluates_the_model_it_names(engine: str, evaluated: str, word: str) -> None:
    arrays = recording("pfedme")
    replay = Replay(METHODS["pfedme"](eval_model=evaluated), engine)
    for number in (1, 2, 3):
        replay.advance()
        here = f"round{number}/client"
        assert replay.correct() == [int(arrays[f"{here}{client}/correct_{word}"]) for client in range(4)]
        assert float((replay.logits() - torch.from_numpy(arrays[f"{here}0/logits_{word}"])).abs().max()) < LIMIT


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("fedprox", {"mu": 0.0}), ("ditto", {"lam": 0.0}), ("pfedme", {"theta_decay": 0.0}), ("pfedme", {"lam": 14.0})],
)
def test_recording_tells_a_wrong_method_from_a_right_one(name: str, wrong: dict[str, float]) -> None:
    case = next(case for case in CASES if case.recording == name)
    replay = Replay(dataclasses.replace(case.method, **wrong), "vmap")
    for _ in range(3):
        replay.advance()
    arrays = recording(name)
    gaps = [gap(replay.shared, recorded_tree(arrays, "round3/global/"))]
    if case.private:
        gaps.append(gap(private_model(tree.take(replay.private, 0)), recorded_tree(arrays, "round3/client0/personal/")))
    assert max(gaps) > 2 * LIMIT
