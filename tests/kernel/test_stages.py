"""The stages: trace, lower, compile, interpret."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lang.checks import like_first, numbers, refused
from tilekern.errors import ArgumentError, TargetError
from tilekern.ir.parse import parse

pytestmark = pytest.mark.sweep(1)  # all cases: none compiles a program

X = numbers(7)


@tk.kernel(out_type=lambda x, y: {"sum": jax.ShapeDtypeStruct(x.shape, x.dtype)})
def add(x, y, out, *, block: tk.Block = 4):
    i = tk.parallel(x.shape[0], block)
    out["sum"][i] = x[i] + y["a"][i]


S = jax.ShapeDtypeStruct(X.shape, X.dtype)
ARGUMENTS = X, {"a": X * 2}


@pytest.mark.smoke
def test_all_stages_from_types_alone() -> None:
    traced = add.trace(S, {"a": S})
    lowered = traced.lower("cpu:xla")
    compiled = lowered.compile()
    np.testing.assert_array_equal(compiled(*ARGUMENTS)["sum"], X * 3)
    np.testing.assert_array_equal(tk.interpret(traced)(*ARGUMENTS)["sum"], X * 3)
    np.testing.assert_array_equal(traced.interpret(*ARGUMENTS)["sum"], X * 3)
    assert lowered.target == "cpu:xla"
    assert compiled.memory_analysis().temp_size_in_bytes >= 0


@pytest.mark.smoke
def test_the_stages_of_a_gpu_without_one() -> None:
    """Lowered for a GPU: the source is there, runs in Triton's interpreter, and becomes machine code."""
    lowered = add.trace(S, {"a": S}).lower("cuda:sm_90")
    assert (lowered.target, str(lowered)) == ("cuda:sm_90", lowered.text)
    assert "@triton.jit\ndef add" in lowered.text
    pytest.importorskip("triton", reason="needs triton")
    found = lowered.interpret(*ARGUMENTS)
    assert list(found) == ["sum"] and isinstance(found["sum"], np.ndarray)
    np.testing.assert_array_equal(found["sum"], X * 3)
    compiled = lowered.compile()
    assert set(compiled.asm) == {"ttir", "ttgir", "ptx", "cubin", "sass"}
    assert (compiled.resources.spills, compiled.resources.threads) == (0, 32)


def test_the_stages_of_the_portable_backend() -> None:
    lowered = add.trace(*ARGUMENTS).lower("cpu:xla")
    np.testing.assert_array_equal(lowered.interpret(*ARGUMENTS)["sum"], X * 3)
    compiled = lowered.compile()
    assert list(compiled.asm) == ["hlo"] and compiled.asm["hlo"].startswith("HloModule jit_add")
    assert compiled.resources.scratch_bytes == compiled.memory_analysis().temp_size_in_bytes


@tk.kernel(out_type=lambda x, y: x)
def product(x, y, out, *, block: tk.Block = 64):
    i = tk.parallel(x.shape[0], block)
    j = tk.parallel(y.shape[1], block)
    steps = tk.serial(x.shape[1], block)
    acc = tk.fold(steps, lambda k, acc: tk.dot(x[i, k], y[k, j], acc), tk.zeros((i, j)))
    out[i, j] = acc.astype(out.dtype)


PLANS = {
    "cpu:xla": ("product on cpu:xla: 16 programs", "4 tiles of 64, 256 elements: 4 at once", "k: at most 4 tiles"),
    "cpu:llvm": ("product: 16 tasks",),
    "cuda:sm_90": (
        "product on cuda:sm_90: 16 programs, 4 warps each",
        "j: 4 tiles of 64",
        "test_stages.py:",
        "by TMA copies of [64, 64]",
    ),
    "tpu:v5e": ("product on tpu:v5e: ", "grid", "VMEM"),
}


@pytest.mark.parametrize("target", PLANS)
def test_every_target_has_a_plan_in_words(target: str) -> None:
    if target == "cpu:llvm":
        pytest.importorskip("llvmlite", reason="needs llvmlite")
    square = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    plan = product.trace(square, square).lower(target).plan
    assert all(part in plan for part in PLANS[target]), plan


def test_what_is_interpreted_has_the_types_it_was_traced_for() -> None:
    lowered = add.trace(*ARGUMENTS).lower("cuda:sm_90")
    with refused(
        ArgumentError, "add was traced for other arguments", expected="x = float32[7]", got="int32[7]", fix="again"
    ):
        lowered.interpret(X.astype(np.int32), {"a": X})  # <-


def test_stages_print() -> None:
    traced = add.trace(*ARGUMENTS)
    assert str(traced) == str(traced.ir)
    assert str(parse(str(traced))) == str(traced)
    lowered = traced.lower("cpu:xla")
    assert str(lowered) == lowered.text
    assert lowered.text.startswith("module @jit_add")
    assert str(lowered.ir) == str(traced)
    assert repr(add) == "<tilekern kernel add>"


def test_a_kernel_looks_like_its_function() -> None:
    @like_first
    def documented(x, out):
        """What it does."""

    assert documented.__name__ == "documented"
    assert documented.__doc__ == "What it does."
    assert documented.__module__ == __name__


def test_stages_take_static_arguments_and_blocks() -> None:
    traced = add.trace(*ARGUMENTS, block=3, target="cpu")
    assert traced.ir.axes[0].block == 3
    np.testing.assert_array_equal(traced.lower("cpu").compile()(*ARGUMENTS)["sum"], X * 3)


def test_tracing_again_gives_the_same_ir() -> None:
    assert add.trace(*ARGUMENTS).ir is add.trace(S, {"a": S}).ir


def test_a_large_captured_array_travels_with_the_stages() -> None:
    table = jnp.arange(5000.0)

    @like_first
    def f(x, out):
        out[...] = x[...] + table[4999]

    for run in (f.trace(S).lower("cpu").compile(), tk.interpret(f.trace(S)), f):
        np.testing.assert_array_equal(run(X), X + 4999)


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong", [(X,), (X, X), (X, {"a": X}, X), (X, {"b": X})], ids=["too few", "no tree", "too many", "another key"]
)
@pytest.mark.parametrize("stage", ["compiled", "interpreted"])
def test_arguments_of_another_structure(stage: str, wrong: tuple) -> None:
    traced = add.trace(*ARGUMENTS)
    run = traced.lower("cpu").compile() if stage == "compiled" else tk.interpret(traced)
    with refused(
        ArgumentError, "add was traced for other arguments", expected="{'a': *}", got="PyTreeDef", fix="again"
    ):
        run(*wrong)  # <-


@pytest.mark.parametrize(
    ("wrong", "got"), [(X[:5], "x = float32[5]"), (X.astype(np.int32), "x = int32[7]"), (X[None], "x = float32[1, 7]")]
)
@pytest.mark.parametrize("stage", ["compiled", "interpreted"])
def test_arguments_of_another_type(stage: str, wrong: np.ndarray, got: str) -> None:
    traced = add.trace(*ARGUMENTS)
    run = traced.lower("cpu").compile() if stage == "compiled" else tk.interpret(traced)
    with refused(ArgumentError, "add was traced for other arguments", expected="x = float32[7]", got=got, fix="again"):
        run(wrong, {"a": X})  # <-


def test_lowering_for_a_target_that_does_not_exist() -> None:
    traced = add.trace(*ARGUMENTS)
    with refused(
        TargetError, "there is no such target", expected="'cuda:sm_90'", got="target = 'gpu'", fix="'cpu:xla'"
    ):
        traced.lower("gpu")  # <-


def test_lowering_what_captures_traced_values() -> None:
    @jax.jit
    def outer(x):
        @like_first
        def f(y, out):
            out[...] = y[...] + jnp.max(x)

        f.trace(S).lower("cpu")  # the line of the error
        return x

    with pytest.raises(TargetError, match="f closes over values that are being traced") as raised:
        outer(X)
    assert "known values only" in raised.value.expected
    assert "enclosing jax.jit" in raised.value.got
    assert "pass the values as arguments" in raised.value.fix
    assert raised.value.loc.function == "outer"


@pytest.mark.parametrize("kernel", ["kernel", "function"])
def test_what_is_not_traced_is_not_interpreted(kernel: str) -> None:
    @like_first
    def f(x, out):
        out[...] = x[...]

    given: Any = f if kernel == "kernel" else lambda x: f(x)
    with refused(ArgumentError, "takes a traced kernel", expected="kernel.trace(", got="(", fix="kernel.trace(x, y)"):
        tk.interpret(given)  # <-
