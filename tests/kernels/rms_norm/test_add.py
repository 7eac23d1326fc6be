import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilekern.errors import ArgumentError
from tilekern.kernels.rms_norm import add_reference, add_rms_norm, rms_norm
from tilekern.kernels.rms_norm.cases import CASES, Case
from tilekern.kernels.rms_norm.kernel import add_rms_norm_forward
from tilekern.testing import arrays, assert_close, in_float64, lengths

BLOCKS = ({}, {"block_rows": 3, "block_columns": 7}, {"block_columns": 1})

naive = jax.jit(add_reference, static_argnames="dtype")


def check(x: Any, residual: Any, weight: Any, *, eps: float = 1e-6, offset: float = 0.0, **blocks: int) -> None:
    keywords = {"eps": eps, "offset": offset}
    with jax.enable_x64(x.dtype == np.float64):
        found = add_rms_norm(x, residual, weight, **keywords, **blocks)
        low = naive(x, residual, weight, **keywords, dtype=x.dtype)
        separate = jnp.add(x, residual)
    oracle = in_float64(add_reference, *(v for v in (x, residual, weight) if v is not None), **keywords)
    for f, o, n in zip(found, oracle, low, strict=True):
        assert_close(f, o, n, length=x.shape[-1])
    np.testing.assert_array_equal(found[1], separate)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@settings(max_examples=8)
@given(data=st.data(), rows=lengths(4), columns=lengths(16), blocks=st.sampled_from(BLOCKS))
def test_floats(dtype: str, data: st.DataObject, rows: int, columns: int, blocks: dict[str, int]) -> None:
    x, residual = (data.draw(arrays(jnp.dtype(dtype), (rows, columns))) for _ in range(2))
    weight = data.draw(st.none() | arrays(jnp.dtype(dtype), (columns,)))
    check(x, residual, weight, eps=data.draw(st.sampled_from([1e-6, 0.5])), offset=1.0, **blocks)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", [case.small() for case in CASES], ids=lambda case: case.name)
def test_small_cases(case: Case, dtype: str) -> None:
    x, weight = case.arrays(jax.random.key(0), dtype)
    residual, _ = case.arrays(jax.random.key(1), dtype)
    check(x, residual, weight, **case.keywords, block_rows=16, block_columns=32)


@pytest.mark.parametrize("shape", [(37,), (2, 3, 5), (2, 0, 5), (3, 0)])
def test_any_rank(shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(0)
    check(*(random.standard_normal(s).astype(np.float32) for s in (shape, shape, shape[-1:])), block_rows=2)


def test_is_rms_norm_of_the_rounded_sum() -> None:
    x, residual = (jax.random.normal(jax.random.key(n), (5, 96), jnp.bfloat16) for n in range(2))
    out, total = add_rms_norm(x, residual)
    np.testing.assert_array_equal(out, rms_norm(total))


@pytest.mark.one_backend
def test_the_backward_pass_keeps_the_sum_and_the_weight() -> None:
    x, weight = jnp.ones((4, 8)), jnp.ones(8)
    total = add_rms_norm(x, x, weight)[1]
    kept = jax.tree.leaves(jax.vjp(add_rms_norm, x, x, weight)[1])
    assert sorted(k.shape for k in kept) == [(4, 8), (8,)]
    np.testing.assert_array_equal(next(k for k in kept if k.ndim == 2), total)


@pytest.mark.one_backend
@pytest.mark.parametrize("columns", [4096, 20000])
@pytest.mark.parametrize("target", ["cuda:sm_90", "tpu:v5e"])
def test_compiles_without_spills(target: str, columns: int) -> None:
    pytest.importorskip("triton" if target.startswith("cuda") else "libtpu", reason=f"compiles for {target}")
    x, weight = jax.ShapeDtypeStruct((4096, columns), jnp.bfloat16), jax.ShapeDtypeStruct((columns,), jnp.bfloat16)
    compiled = add_rms_norm_forward.trace(x, x, weight, eps=1e-6, offset=0.0, target=target).lower(target).compile()
    assert target.startswith("tpu") or compiled.resources.spills == 0


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("residual", "weight", "got"),
    [
        (jnp.zeros((2, 4)), None, "x = float32[2, 3], residual = float32[2, 4], weight = None"),
        (jnp.zeros((2, 3), jnp.bfloat16), None, "residual = bfloat16[2, 3]"),
        (jnp.zeros((2, 3)), jnp.zeros(2), "weight = float32[2]"),
        (None, None, "residual = None"),
    ],
)
def test_arrays_that_do_not_fit(residual: Any, weight: Any, got: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(got)) as caught:
        add_rms_norm(jnp.zeros((2, 3)), residual, weight)  # here
    assert "# here" in caught.value.loc.snippet()
