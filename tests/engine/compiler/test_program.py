"""Programs compute what their function does, in fixed memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, fx
from torch.func import grad, vmap
from torch.nn import functional as F

from gpfl.engine.compiler.program import Buffers, Program, to_channels_last
from gpfl.errors import GpflError

trace_modes = pytest.mark.parametrize("traced", [True, False], ids=["traced", "untraced"])


class Pair(NamedTuple):
    """A named tuple of buffers."""

    x: Tensor
    y: Tensor


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def state() -> Buffers:
    return {"w": random(3, 4), "past": {"w": torch.zeros(3, 4)}, "step": torch.zeros(1, dtype=torch.int64)}


def fixed() -> Buffers:
    return {"batches": Pair(random(5, 2, 4, seed=1), random(5, 2, 3, seed=2)), "scale": torch.tensor(0.5)}


def advance(state: Buffers, fixed: Buffers) -> Buffers:
    """Take a step on the batch that a counter points to; `past` is the state before."""
    batches = fixed["batches"]
    x, y = (part.index_select(0, state["step"]).squeeze(0) for part in (batches.x, batches.y))
    gradient = grad(lambda w: (x @ w.t() - y).square().mean())(state["w"])
    # Keys in another order than the state's.
    return {"step": state["step"] + 1, "past": {"w": state["w"]}, "w": state["w"] - 0.1 * gradient * fixed["scale"]}


def clone(buffers: Buffers) -> Buffers:
    return torch.utils._pytree.tree_map(torch.clone, buffers)


def assert_equal(found: Buffers, expected: Buffers) -> None:
    assert found.keys() == expected.keys()
    torch.testing.assert_close(dict(found), {key: expected[key] for key in found})


@trace_modes
def test_calls_match_the_function(traced: bool) -> None:
    program, expected = Program(advance, state(), fixed(), traced=traced), state()
    memory = program.state["w"].data_ptr()
    for _ in range(5):
        program()
        expected = advance(expected, fixed())
        assert_equal(program.state, expected)
    assert program.state["w"].data_ptr() == memory
    torch.testing.assert_close(program.fixed["batches"].x, fixed()["batches"].x)


@trace_modes
def test_calls_read_the_current_content_of_buffers(traced: bool) -> None:
    program = Program(advance, state(), fixed(), traced=traced)
    program()
    program.fixed["scale"].fill_(2.0)
    program.state["w"].copy_(random(3, 4, seed=7))
    program.state["step"].zero_()
    program()
    expected = {**state(), "w": random(3, 4, seed=7)}
    assert_equal(program.state, advance(expected, {**fixed(), "scale": torch.tensor(2.0)}))


@trace_modes
def test_making_a_program_does_not_change_its_state(traced: bool) -> None:
    program = Program(advance, state(), fixed(), traced=traced)
    assert_equal(program.state, state())


@trace_modes
def test_clone_has_memory_of_its_own_except_for_aliased_buffers(traced: bool) -> None:
    first = Program(advance, state(), fixed(), traced=traced)
    copy = first.clone(("batches",))
    assert copy.fixed["batches"].x is first.fixed["batches"].x
    assert copy.fixed["scale"].data_ptr() != first.fixed["scale"].data_ptr()
    copy.fixed["scale"].fill_(2.0)
    copy.state["w"].copy_(random(3, 4, seed=7))
    copy()
    assert_equal(first.state, state())
    first()
    assert_equal(first.state, advance(state(), fixed()))
    expected = advance({**state(), "w": random(3, 4, seed=7)}, {**fixed(), "scale": torch.tensor(2.0)})
    assert_equal(copy.state, expected)


SWAPS: dict[str, Callable[[Buffers, Buffers], Buffers]] = {
    "swapped": lambda s, f: {"a": s["b"], "b": s["a"]},
    "transposed": lambda s, f: {"a": s["a"].t(), "b": s["b"]},
    "shifted": lambda s, f: {"a": s["a"] * 2, "b": s["a"]},
    "concatenated": lambda s, f: {"a": torch.cat([s["a"][1:], s["b"][:1]]), "b": s["a"].view(-1)[:9].view(3, 3)},
}


@trace_modes
@pytest.mark.parametrize("name", SWAPS)
def test_state_that_becomes_other_state_is_read_before_it_is_overwritten(name: str, traced: bool) -> None:
    expected: Buffers = {"a": random(3, 3), "b": random(3, 3, seed=1)}
    program = Program(SWAPS[name], clone(expected), {}, traced=traced)
    for _ in range(3):
        program()
        expected = clone(SWAPS[name](expected, {}))
        assert_equal(program.state, expected)


@trace_modes
@pytest.mark.parametrize(
    "wrong", [{"a": torch.zeros(2)}, {"a": torch.zeros(2), "c": torch.zeros(2)}], ids=["fewer keys", "other keys"]
)
def test_function_that_returns_another_state_raises(wrong: Buffers, traced: bool) -> None:
    with pytest.raises(ValueError, match=r"key|mismatch"):
        Program(lambda state, fixed: wrong, {"a": torch.zeros(2), "b": torch.zeros(2)}, {}, traced=traced)()


def test_function_that_branches_on_values_runs_untraced() -> None:
    def step(state: Buffers, fixed: Buffers) -> Buffers:
        return {"a": state["a"] + 1} if float(state["a"].sum()) < 3 else {"a": state["a"] * 10}

    program = Program(step, {"a": torch.zeros(2)}, {})
    assert not program.traced
    copy = program.clone(())
    for _ in range(3):
        program()
    assert program.state["a"].tolist() == [20.0, 20.0]
    assert copy.state["a"].tolist() == [0.0, 0.0]


DYNAMIC: dict[str, Callable[[Tensor], Tensor]] = {
    "mask": lambda x: x[x > 0].mean(),
    "masked write": lambda x: x.clone().index_put((x > 0,), x[x > 0] * 2).sum(),
    "nonzero": lambda x: x[x.gt(0).nonzero().squeeze(1)].mean(),
    "unique": lambda x: x.sum() / x.unique().numel(),
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_function_with_dynamic_shapes_runs_untraced(name: str) -> None:
    def step(state: Buffers, fixed: Buffers) -> Buffers:
        return {"sum": state["sum"] + DYNAMIC[name](fixed["x"])}

    program = Program(step, {"sum": torch.zeros(())}, {"x": torch.tensor([1.0, -1.0, 2.0, 3.0])})
    assert not program.traced
    for values in ([1.0, 2.0, 4.0, 8.0], [-3.0, -3.0, 4.0, -8.0]):
        program.fixed["x"].copy_(torch.tensor(values))
        expected = program.state["sum"] + DYNAMIC[name](torch.tensor(values))
        program()
        torch.testing.assert_close(program.state["sum"], expected)


def test_indexing_by_integers_is_traced() -> None:
    step: Callable[[Buffers, Buffers], Buffers] = lambda s, f: {"sum": s["sum"] + f["x"][f["index"]].sum()}  # noqa: E731
    assert Program(step, {"sum": torch.zeros(())}, {"x": random(5), "index": torch.tensor([1, 1, 3])}).traced


@pytest.mark.parametrize("compiled", [True, False])
def test_operations_that_cannot_be_captured_are_called_one_by_one(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    def fail(self: Program) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Program, "capture_devices", ("cpu",))
    monkeypatch.setattr(Program, "_capture", fail)
    program, expected = Program(advance, state(), fixed(), compiled=compiled), state()
    assert program.traced
    for _ in range(3):
        program()
        expected = advance(expected, fixed())
        assert_equal(program.state, expected)
    if compiled:
        with pytest.raises(GpflError, match=r"cannot be compiled on cpu .*: use --compile off"):
            Program(advance, state(), fixed(), compiled=True, compile_required=True)


class Compiler:
    """A stand-in for torch's compiler that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.error: Exception | None = None
        self.results: list[object] = []

    def __call__(self, module: fx.GraphModule, examples: list[Tensor], options: dict[str, object]) -> fx.GraphModule:
        self.calls += 1
        if self.error:
            raise self.error
        self.results.append(module)
        return module


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiler:
    """Count the steps that are compiled; times are stored in an empty folder."""
    compiler = Compiler()
    monkeypatch.setattr("torch._inductor.compile", compiler)
    monkeypatch.setenv("GPFL_CACHE", str(tmp_path / "cache"))
    return compiler


def fake_times(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
    monkeypatch.setattr(Program, "_time_forms", lambda *_: list(seconds))


@pytest.mark.parametrize(("compiled_seconds", "compiled"), [(1e-3, True), (3e-3, False)])
def test_steps_are_timed_by_the_first_run_and_compiled_where_that_is_faster(
    compiled_seconds: float, compiled: bool, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_times(monkeypatch, 2e-3, compiled_seconds)
    first = Program(advance, state(), fixed(), compiled=True, calls=10**7)
    fake_times(monkeypatch)  # a second measurement would fail
    second = Program(advance, state(), fixed(), compiled=True, calls=10**7)
    assert compiler.calls == 1 + compiled  # the first run measures both forms
    for program in (first, second):
        assert (program._run in compiler.results) == compiled


def test_stored_times_do_not_change_runs_that_are_too_short_to_be_timed(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_times(monkeypatch, 2.0, 1e-3)
    Program(advance, state(), fixed(), compiled=True, calls=10**7)
    Program(advance, state(), fixed(), compiled=True, calls=10)
    assert compiler.calls == 1


def test_steps_stay_uncompiled_where_times_cannot_be_stored(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GPFL_CACHE", str(tmp_path / "file"))
    program = Program(advance, state(), fixed(), compiled=True, calls=10**7)
    assert program._run not in compiler.results


def test_timing_leaves_the_state_as_it_is() -> None:
    program = Program(advance, state(), fixed())
    times = program._time_forms(program._run, program._run)
    assert len(times) == 2
    assert min(times) > 0
    assert_equal(program.state, state())


def test_program_runs_uncompiled_on_a_cpu_without_a_compiler(compiler: Compiler) -> None:
    compiler.error = RuntimeError("No working C++ compiler found\nmore")
    program, expected = Program(advance, state(), fixed(), compiled=True, calls=10**9), advance(state(), fixed())
    program()
    assert_equal(program.state, expected)
    with pytest.raises(GpflError, match=r"cannot be compiled on cpu \(No working C\+\+ compiler found\): use --compile off"):
        Program(advance, state(), fixed(), compiled=True, compile_required=True)


@pytest.mark.slow
def test_compiled_program_on_a_cpu_matches_the_function() -> None:
    program, expected = Program(advance, state(), fixed(), compiled=True, compile_required=True), state()
    assert not isinstance(program._run, fx.GraphModule)
    for _ in range(3):
        program()
        expected = advance(expected, fixed())
        assert_equal(program.state, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    "waits", [lambda w: w * torch.ones(4).to(w.device), lambda w: w @ torch.linalg.inv(w.t() @ w + w.new_ones(4).diag())]
)
def test_operations_that_synchronise_are_called_one_by_one(waits: Callable[[Tensor], Tensor], compiled: bool) -> None:
    def step(state: Buffers, fixed: Buffers) -> Buffers:
        return {"w": waits(state["w"]) + 1}

    program, expected = Program(step, {"w": random(3, 4).cuda()}, {}, compiled=compiled), {"w": random(3, 4).cuda()}
    for _ in range(3):
        program()
        expected = step(expected, {})
    torch.testing.assert_close(program.state["w"], expected["w"])
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    next_program = Program(lambda state, fixed: {"w": state["w"] + 1}, {"w": torch.zeros(2).cuda()}, {})
    assert next_program._graph is not None, "a failed capture does not affect the next one"


@pytest.mark.parametrize("compiled", [True, False])
def test_program_for_a_gpu_computes_the_same_on_a_cpu(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    def loss(kernel: Tensor, table: Tensor, tokens: Tensor, x: Tensor) -> Tensor:
        return (F.conv2d(x, kernel, padding=1).mean((2, 3)) + F.embedding(tokens, table, 0).mean(1)).square().sum()

    def step(state: Buffers, fixed: Buffers) -> Buffers:
        kernel, table = vmap(grad(loss, (0, 1)))(state["kernel"], state["table"], fixed["tokens"], fixed["x"])
        return {"kernel": state["kernel"] - 0.1 * kernel, "table": state["table"] - 0.1 * table}

    start = {"kernel": random(3, 5, 2, 3, 3), "table": random(3, 7, 5)}
    fixed = {"tokens": torch.arange(24).reshape(3, 4, 2) % 7, "x": random(3, 4, 2, 6, 6)}
    monkeypatch.setattr(Program, "matmul_devices", ("cpu",))
    program, expected = Program(step, clone(start), fixed, compiled=compiled), start
    for _ in range(3):
        program()
        expected = step(expected, fixed)
    assert_equal(program.state, expected)
    names = " ".join(str(node.target) for node in program._run.graph.nodes)
    assert "convolution" not in names
    assert ("add_rows_" in names) == compiled


@pytest.mark.gpu
@trace_modes
def test_program_runs_on_a_gpu_that_is_not_the_current_one(traced: bool) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    buffers = [torch.utils._pytree.tree_map(lambda t: t.to("cuda:1"), part) for part in (state(), fixed())]
    program, expected = Program(advance, *buffers, traced=traced), state()
    for _ in range(3):
        program()
        expected = advance(expected, fixed())
    torch.testing.assert_close(program.state["w"].cpu(), expected["w"])


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_last_weights_have_the_strides_that_convolutions_look_at(channels: int) -> None:
    weight = random(8, channels, 5, 4)
    converted = to_channels_last({"w": weight}, stacked=False)["w"]
    assert torch.equal(converted, weight)
    assert converted.stride() == (20 * channels, 1, 4 * channels, channels)
    assert F.conv2d(random(2, channels, 9, 9), converted).is_contiguous(memory_format=torch.channels_last)


def test_programs_on_cpus_keep_convolutions_channels_last() -> None:
    def convolve(state: Buffers, fixed: Buffers) -> Buffers:
        return {"w": state["w"] - 0.1 * grad(lambda w: F.conv2d(fixed["x"], w).square().sum())(state["w"])}

    state, x = {"w": random(8, 1, 3, 3)}, random(2, 1, 6, 6, seed=1)
    program = Program(convolve, state, {"x": x}, weights={"w": False})
    expected = convolve(state, {"x": x})["w"]
    program()
    assert program.state["w"].stride()[1] == 1
    torch.testing.assert_close(program.state["w"], expected)


def test_fixed_buffers_that_no_operation_reads_are_not_loaded() -> None:
    def advance(state: Buffers, fixed: Buffers) -> Buffers:
        return {"w": state["w"] + fixed["shared"]["read"]}

    for traced in (True, False):
        fixed = {"shared": {"read": torch.ones(3), "unread": torch.zeros(4)}}
        program = Program(advance, {"w": torch.zeros(3)}, fixed, traced=traced)
        program.load("shared", {"read": torch.full((3,), 2.0), "unread": torch.ones(4)})
        program()
        assert program.state["w"].tolist() == [2.0, 2.0, 2.0]
        assert bool(program.fixed["shared"]["unread"].any()) is not traced
        clone = program.clone(())
        clone.load("shared", {"read": torch.ones(3), "unread": torch.full((4,), 3.0)})
        assert clone.fixed["shared"]["unread"].tolist() == [3.0] * 4  # in memory of its own, of which nothing is known
