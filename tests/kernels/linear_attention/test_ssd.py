import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.recurrences import packed
from tilekern.errors import ArgumentError
from tilekern.kernels.linear_attention import ssd
from tilekern.testing import assert_close, in_float64


def problem(dtype: Any = "float32", *, tokens: int = 29) -> list[Any]:
    """x of four heads, dt, a, b and c of two groups, d, and a state."""
    random = np.random.default_rng(0)
    x, b, c = (
        random.standard_normal((2, tokens, *shape)).astype(jnp.dtype(dtype)) for shape in ((4, 6), (2, 5), (2, 5))
    )
    dt = random.uniform(0.01, 1, (2, tokens, 4)).astype(np.float32)
    a, d = -random.uniform(0.1, 4, 4).astype(np.float32), random.standard_normal(4).astype(np.float32)
    return [x, dt, a, b, c, d, random.standard_normal((2, 4, 5, 6)).astype(np.float32)]


def naive(x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any, state: Any, *, ids: Any = None, dtype: Any = None) -> Any:
    """Token by token."""
    wide = dtype or jnp.promote_types(x.dtype, jnp.float32)
    of_dtypes = x.dtype, jnp.promote_types(x.dtype, jnp.float32)
    x, dt, a, b, c, d, state = (jnp.asarray(v).astype(wide) for v in (x, dt, a, b, c, d, state))
    out = []
    for t in range(x.shape[1]):
        same = (ids[:, t] == ids[:, max(t - 1, 0)])[:, None] if ids is not None else True
        decay = jnp.where(same, jnp.exp(dt[:, t] * a), 0)[..., None, None]
        of_heads = (jnp.repeat(v[:, t], x.shape[2] // v.shape[2], axis=1) for v in (b, c))
        b_t, c_t = of_heads
        state = decay * state + (dt[:, t, :, None] * b_t)[..., None] * x[:, t, :, None, :]
        out.append(jnp.einsum("bhnp,bhn->bhp", state, c_t, precision="highest") + d[:, None] * x[:, t])
    return jnp.stack(out, 1).astype(of_dtypes[0]), state.astype(of_dtypes[1])


@pytest.mark.parametrize("ids", [None, packed(29)], ids=["one", "packed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_floats(dtype: str, ids: Any) -> None:
    arrays = problem(dtype)
    with jax.enable_x64(dtype == "float64"):
        found = ssd(*arrays, segment_ids=ids, block_t=8)
        lows = jax.jit(partial(naive, ids=ids, dtype=jnp.dtype(dtype)))(*arrays)
    for out, oracle, low in zip(found, in_float64(partial(naive, ids=ids), *arrays), lows, strict=True):
        assert_close(out, oracle, low, length=40)


def test_gradients() -> None:
    arrays = problem(tokens=11)
    weights = np.random.default_rng(1).standard_normal(arrays[0].shape).astype(np.float32)

    def gradient(function: Any, *arrays: Any) -> Any:
        return jax.grad(lambda *a: (function(*a)[0] * weights).sum(), argnums=range(7))(*arrays)

    found = gradient(partial(ssd, block_t=4), *arrays)
    lows = gradient(naive, *arrays)
    for out, oracle, low in zip(found, in_float64(partial(gradient, naive), *arrays), lows, strict=True):
        assert_close(out, oracle, low, length=200, factor=3)


@pytest.mark.one_backend
def test_factors_of_the_input_itself() -> None:
    x, dt, a, b, c, d, _ = problem()
    of_heads = np.broadcast_to(d[:, None], (4, 6))
    np.testing.assert_array_equal(ssd(x, dt, a, b, c, of_heads)[0], ssd(x, dt, a, b, c, d)[0])
    without = ssd(x, dt, a, b, c)[0]
    np.testing.assert_allclose(ssd(x, dt, a, b, c, d)[0], without + of_heads * x, rtol=1e-6, atol=1e-6)


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("change", "got"),
    [
        ({0: jnp.zeros((2, 29, 4, 6), jnp.int32)}, "x = int32[2, 29, 4, 6]"),
        ({0: jnp.zeros((2, 29, 3, 6))}, "x = float32[2, 29, 3, 6]"),
        ({1: jnp.zeros((2, 29))}, "dt = float32[2, 29]"),
        ({2: jnp.zeros((4, 5))}, "a = float32[4, 5]"),
        ({4: jnp.zeros((2, 29, 2, 4))}, "c = float32[2, 29, 2, 4]"),
        ({5: jnp.zeros(6)}, "d = float32[6]"),
        ({6: jnp.zeros((2, 4, 6, 5))}, "initial_state = float32[2, 4, 6, 5]"),
    ],
)
def test_arrays_that_do_not_fit(change: dict[int, Any], got: str) -> None:
    arrays = [change.get(n, x) for n, x in enumerate(problem())]
    with pytest.raises(ArgumentError, match=re.escape(got)) as caught:
        ssd(*arrays)  # here
    assert "# here" in caught.value.loc.snippet()
