"""Ops: plain JAX code around kernels, with blocks of its own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lang.checks import numbers, refused
from tilekern.errors import ArgumentError

X = numbers(12)


@tk.kernel(out_type=lambda x, splits: jax.ShapeDtypeStruct((splits,), x.dtype))
def partial_sums(x, out, *, splits: int):
    i = tk.parallel(splits)
    size = x.shape[0] // splits
    out[i] = x[tk.ds(i * size, size)].sum()


@tk.op(out_type=lambda x: jax.ShapeDtypeStruct((), x.dtype))
def total(x, *, scale: float = 1.0, splits: tk.Block = 4):
    """The shape of the partial sums depends on a block."""
    return partial_sums(x, splits=splits).sum() * scale


@pytest.mark.parametrize("splits", [1, 3, 6, None])
def test_an_op_is_a_function(splits: int | None) -> None:
    assert total(X, splits=splits) == X.sum()
    assert jax.jit(lambda x: total(x, scale=2.0, splits=splits))(X) == 2 * X.sum()
    np.testing.assert_array_equal(jax.vmap(total)(np.stack([X, -X])), [X.sum(), -X.sum()])
    np.testing.assert_array_equal(jax.vmap(jax.vmap(total))(X[None, None]), [[X.sum()]])


def test_a_schedule_chooses_the_blocks_of_an_op() -> None:
    seen: list[int] = []

    @tk.op(out_type=lambda x: x)
    def f(x, *, splits: tk.Block = 4):
        seen.append(splits)
        return x

    @f.schedule("cpu")
    def on_cpu(x):
        return {"splits": 3}

    f(X)
    f(X, splits=6)
    assert list(dict.fromkeys(seen)) == [3, 6]


def test_an_op_with_pytrees() -> None:
    @tk.op(out_type=lambda x, extra: {"a": x, "b": (x, None)})
    def f(x, extra):
        return {"a": x + (0 if extra is None else extra["y"]), "b": (-x, None)}

    result = f(X, {"y": X})
    np.testing.assert_array_equal(result["a"], 2 * X)
    np.testing.assert_array_equal(result["b"][0], -X)
    assert result["b"][1] is None
    np.testing.assert_array_equal(f(X, None)["a"], X)


@pytest.mark.parametrize(
    "returned",
    [lambda x: x[:3], lambda x: x.astype(jnp.int32), lambda x: (x, x), lambda x: None],
    ids=["shape", "dtype", "structure", "nothing"],
)
def test_an_op_that_returns_something_else(returned: Any) -> None:
    @tk.op(out_type=lambda x: x)
    def f(x):  # <-
        return returned(x)

    with refused(
        ArgumentError,
        "the op f returned other types than its out_type says",
        expected="ShapeDtypeStruct(shape=(12,), dtype=float32)",
        got="(",
        fix="correct out_type",
    ):
        f(X)


def test_an_op_of_the_wrong_number_of_arrays() -> None:
    with refused(
        ArgumentError, "total is called with the wrong number of arrays", expected="x", got="0 arg", fix="one"
    ):
        total()  # <-
    with pytest.raises(ArgumentError, match="total takes fewer arrays"):
        total(X, X)


def calls_of_triton(function: Any, **keywords: Any) -> int:
    traced = jax.jit(lambda x: function(x, **keywords)).trace(jnp.asarray(X))
    return traced.lower(lowering_platforms=("cuda",)).as_text().count("triton_kernel_call_ffi")


def test_kernels_inside_run_on_the_target_that_the_op_was_asked_for() -> None:
    assert calls_of_triton(total, target="cpu:xla") == 0
    pytest.importorskip("triton", reason="needs triton")
    assert calls_of_triton(total) == calls_of_triton(total, target="cuda:sm_90") == 1


@pytest.mark.parametrize("name", ["num_warps", "num_stages"])
def test_an_op_has_no_launch_options(name: str) -> None:
    with refused(
        ArgumentError,
        "the op total has no programs of its own",
        expected="launch options of the kernels",
        got=f"{name} = 4",
        fix=f"give {name} to the kernels inside",
    ):
        total(X, **{name: 4})  # <-


def test_an_op_that_calls_itself_without_end() -> None:
    @tk.op(out_type=lambda x: x)
    def endless(x):
        return endless(x) + 1

    with pytest.raises(tk.errors.UnsupportedError, match="endless calls itself without end") as caught:
        endless(jnp.ones(3))
    assert caught.value.loc.file == __file__


def test_an_op_that_calls_itself_to_an_end() -> None:
    @tk.op(out_type=lambda x: x)
    def power(x, *, n: int = 3):
        return x if n == 0 else power(x, n=n - 1) * x

    np.testing.assert_array_equal(power(2 * jnp.ones(3)), np.full(3, 16.0))
