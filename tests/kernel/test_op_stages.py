"""The stages of ops: trace, lower, compile."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.kernel.test_op import X, partial_sums, total
from tests.lang.checks import numbers, refused
from tilekern.errors import ArgumentError, TargetError
from tilekern.ir.parse import parse

S = jax.ShapeDtypeStruct(X.shape, X.dtype)


@tk.kernel(out_type=lambda x: {"a": x, "b": x})
def twice(x, out):
    i = tk.parallel(x.shape[0], 4)
    out["a"][i], out["b"][i] = x[i] + x[i], x[i]


@tk.op(out_type=lambda x: x)
def two_stages(x):
    """Kernels of its own, of another op under vmap, in a loop, twice the same; one closes over a value of the op."""
    scale = total(x)

    @tk.kernel(out_type=lambda x: x)
    def scaled(x, out):
        out[...] = x[...] * scale

    rows = jax.vmap(total)(jnp.stack([x, x]))
    looped = jax.lax.fori_loop(0, 2, lambda _, x: twice(x)["a"], x)
    return scaled(twice(looped)["b"]) + rows.sum() + total(x)


def names(stage: Any) -> list[str]:
    return [kernel.ir.name for kernel in stage.kernels]


def test_an_op_is_traced_with_its_kernels() -> None:
    traced = two_stages.trace(S)
    assert names(traced) == ["partial_sums", "partial_sums", "twice", "scaled"]
    assert [a.name for a in traced.kernels[1].ir.axes] == ["batch", "i"]
    assert str(traced) == "\n\n".join([str(traced.jaxpr), *(str(k.ir) for k in traced.kernels)])
    assert "name=two_stages" not in str(traced) and "tilekern_call[callee=twice]" in str(traced)
    for kernel in traced.kernels:
        assert str(parse(str(kernel))) == str(kernel)


def test_the_kernels_of_an_op_take_flat_arrays() -> None:
    first, batched, pair, closure = two_stages.trace(S).kernels
    np.testing.assert_array_equal(tk.interpret(first)(X), X.reshape(4, 3).sum(1))
    np.testing.assert_array_equal(tk.interpret(batched)(numbers(2, 12)), numbers(2, 4, 3).sum(2))
    np.testing.assert_array_equal(tk.interpret(pair)(X), (2 * X, X))
    np.testing.assert_array_equal(tk.interpret(closure)(X, np.float32(3)), 3 * X)
    lowered = pair.lower("cpu:xla")
    for run in (lowered.interpret, lowered.compile()):
        np.testing.assert_array_equal(run(X), (2 * X, X))
    with refused(ArgumentError, "twice was traced for other arguments", expected="x = float32[12]", got="x = int32"):
        pair.lower("cpu:xla").interpret(X.astype(np.int32))  # <-


@pytest.mark.smoke
@pytest.mark.parametrize("target", ["cpu", "cpu:xla"])
def test_an_op_is_lowered_and_compiled_with_its_kernels(target: str) -> None:
    lowered = two_stages.trace(S).lower(target)
    assert names(lowered) == ["partial_sums", "partial_sums", "twice", "scaled"]
    assert str(lowered) == lowered.text == "\n\n".join(kernel.text for kernel in lowered.kernels)
    compiled = lowered.compile()
    assert len(compiled.kernels) == 4 and all(kernel.asm for kernel in compiled.kernels)
    np.testing.assert_array_equal(compiled(X), two_stages(X))
    assert compiled.asm["hlo"].startswith("HloModule jit_two_stages")
    assert compiled.memory_analysis().temp_size_in_bytes >= 0
    with refused(ArgumentError, "two_stages was traced for other arguments", got="x = float32[3]", fix="again"):
        compiled(X[:3])  # <-


def test_an_op_is_lowered_with_the_blocks_of_the_target() -> None:
    @tk.op(out_type=lambda x: jax.ShapeDtypeStruct((), x.dtype))
    def f(x, *, splits: tk.Block = 4):
        return partial_sums(x, splits=splits).sum()

    @f.schedule("cuda")
    def on_gpus(x):
        return {"splits": 6}

    traced = f.trace(S)
    assert [stage.kernels[0].ir.axes[0].extent for stage in (traced, traced.lower("cuda:sm_90"))] == [4, 6]
    assert "f32[6]" in str(traced.lower("cuda:sm_90").jaxpr)
    assert f.trace(S, splits=3).lower("cuda:sm_90").kernels[0].ir.axes[0].extent == 3
    assert f.trace(S, target="cuda:sm_90").kernels[0].ir.axes[0].extent == 6


def test_an_op_for_a_gpu_without_one() -> None:
    lowered = two_stages.trace(S).lower("cuda:sm_90")
    assert [kernel.target for kernel in lowered.kernels] == ["cuda:sm_90"] * 4
    assert lowered.text.count("@triton.jit") == 4
    pytest.importorskip("triton", reason="needs triton")
    compiled = lowered.compile()
    assert all(kernel.resources.spills == 0 for kernel in compiled.kernels)
    with refused(
        TargetError, "there is no cuda:sm_90 here to run two_stages on", got="JAX runs on cpu", fix=".kernels"
    ):
        compiled(X)  # <-


def test_the_plan_of_an_op_is_that_of_its_kernels() -> None:
    pytest.importorskip("llvmlite", reason="needs llvmlite")
    lowered = two_stages.trace(S).lower("cpu:llvm")
    assert lowered.plan == "\n\n".join(kernel.plan for kernel in lowered.kernels)
    assert lowered.plan.startswith("partial_sums: ")


def test_a_kernel_in_an_op_keeps_the_target_that_it_is_called_with() -> None:
    @tk.op(out_type=lambda x: jax.ShapeDtypeStruct((4,), x.dtype))
    def f(x):
        return partial_sums(x, splits=4, target="cpu:xla") + partial_sums(x, splits=4)

    lowered = f.trace(S).lower("cuda:sm_90")
    assert [kernel.target for kernel in lowered.kernels] == ["cpu:xla", "cuda:sm_90"]

    @tk.op(out_type=lambda x: jax.ShapeDtypeStruct((4,), x.dtype))
    def for_gpus(x):
        return partial_sums(x, splits=4, target="cuda:sm_90")

    with refused(TargetError, "'cuda:sm_90' is lowered for another platform", expected="cuda", got="'cpu'"):
        for_gpus.trace(S).lower("cpu")  # <-


def test_an_op_that_is_asked_for_a_cpu_falls_back_in_its_kernels() -> None:
    """An op asked for "cpu" asks its kernels for "cpu", too: on a GPU they run by the portable backend."""
    traced = jax.jit(lambda x: total(x, target="cpu")).trace(jnp.asarray(X))
    assert "custom_call" not in traced.lower(lowering_platforms=("cuda",)).as_text().replace("@Sharding", "")


def test_stages_of_an_op_keep_the_setting_of_64_bits() -> None:
    @tk.op(out_type=lambda x: x)
    def f(x):
        return twice(x)["a"] * 0.5

    with jax.enable_x64(True):
        traced = f.trace(jax.ShapeDtypeStruct((3,), np.float64))
    compiled, x = traced.lower("cpu:xla").compile(), np.array([0.1, 0.2, 0.3])
    assert "f64" in compiled.asm["hlo"]
    with jax.enable_x64(True):
        found = compiled(x)
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, x)


def test_a_traced_op_is_no_traced_kernel() -> None:
    with refused(ArgumentError, "tk.interpret takes a traced kernel", got="TracedOp", fix="op.trace(x).kernels[0]"):
        tk.interpret(total.trace(S))  # <-


# --- blocks that nobody chose -----------------------------------------------------------------------------------------


@tk.kernel(out_type=lambda x: x)
def softmax_of_rows(x: Any, out: Any, *, rows: tk.Block) -> None:
    i = tk.parallel(x.shape[0], rows)
    out[i, :] = jax.nn.softmax(x[i, :], axis=1)


@tk.kernel(out_type=lambda x: x)
def softmax_by_default(x: Any, out: Any, *, rows: tk.Block = 128) -> None:
    i = tk.parallel(x.shape[0], rows)
    out[i, :] = jax.nn.softmax(x[i, :], axis=1)


@tk.op(out_type=lambda x: x)
def sum_of_softmaxes(x: Any) -> Any:
    return softmax_of_rows(x) + softmax_by_default(x * 2)


@pytest.mark.parametrize("target", ["cpu:llvm", "cuda:sm_90", "tpu:v6e"])
def test_kernels_of_an_op_have_the_blocks_of_the_model_as_alone(target: str) -> None:
    pytest.importorskip({"cpu": "llvmlite"}.get(target[:3], "jax"), reason="needs llvmlite")
    x = jax.ShapeDtypeStruct((64, 200_000), jnp.float32)  # of which no target holds 64 rows
    alone = [
        kernel.trace(x, target=target).lower(target).ir.axes[0].block
        for kernel in (softmax_of_rows, softmax_by_default)
    ]
    for stage in (sum_of_softmaxes.trace(x).lower(target), sum_of_softmaxes.trace(x, target=target)):
        assert [kernel.ir.axes[0].block for kernel in stage.kernels] == alone
    assert alone[1] < 128  # the model replaces the default, in an op, too
