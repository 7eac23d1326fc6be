"""Functions of the user: refused unless they are elementwise, and without effect on what does not count."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.tree_util import Partial

from tests.kernels.flash_attention.features import Featured, grads, judge_all
from tilekern.errors import ArgumentError
from tilekern.kernels.flash_attention import flash_attention
from tilekern.kernels.flash_attention.reference import reference_with_logsumexp as reference

ATTEND = partial(flash_attention, return_logsumexp=True)


def normal(*shapes: tuple[int, ...], dtype: Any = np.float32) -> list[Any]:
    random = np.random.default_rng(0)
    return [random.standard_normal(shape).astype(dtype) for shape in shapes]


# --- what mixes elements ----------------------------------------------------------------------------------------------

Q, K, V = normal((1, 5, 2, 8), (1, 7, 1, 8), (1, 7, 1, 8))
TABLE = np.arange(35.0, dtype=np.float32).reshape(5, 7)


MIXED: dict[str, Callable[..., Any]] = {
    "sum": lambda s, b, n, i, j: s - s.sum() * 0.01,  # here
    "max": lambda s, b, n, i, j: s - jnp.max(s, axis=1, keepdims=True),  # here
    "softmax": lambda s, b, n, i, j: jax.nn.softmax(s, axis=-1),  # here
    "cumsum": lambda s, b, n, i, j: jnp.cumsum(s, axis=1),  # here
    "sort": lambda s, b, n, i, j: jnp.sort(s, axis=1),  # here
    "reverse": lambda s, b, n, i, j: s[::-1],  # here
    "roll": lambda s, b, n, i, j: jnp.roll(s, 1, axis=1),  # here
    "dot": lambda s, b, n, i, j: s @ jnp.ones((s.shape[1], s.shape[1])),  # here
    "one element": lambda s, b, n, i, j: s - s[0, 0],  # here
    "reshape": lambda s, b, n, i, j: s.reshape(-1).reshape(s.shape),  # here
    "mean of positions": lambda s, b, n, i, j: s - (i - i.min()),  # here
    "in a branch": lambda s, b, n, i, j: jax.lax.cond(n == 0, lambda s: s, lambda s: s - s.sum(), s),  # here
    "in a loop": lambda s, b, n, i, j: jax.lax.fori_loop(0, 2, lambda _, s: s - s.sum(), s),  # here
    "positions of a tile": lambda s, b, n, i, j: s + jnp.arange(s.shape[1]),  # here
    "sum of ones": lambda s, b, n, i, j: s + jnp.ones_like(s).sum(),  # here
}


@pytest.mark.one_backend
@pytest.mark.parametrize("name", MIXED)
def test_scores_that_mix_elements(name: str) -> None:
    with pytest.raises(ArgumentError, match="score_mod of flash_attention is not elementwise") as caught:
        flash_attention(Q, K, V, score_mod=MIXED[name])
    error = caught.value
    assert "of this element alone" in error.expected and error.got and "carry" in error.fix
    assert error.loc.file == __file__ and "# here" in error.loc.snippet()


@pytest.mark.one_backend
def test_masks_that_mix_elements() -> None:
    def growing(b: Any, n: Any, i: Any, j: Any) -> Any:
        return jnp.cumsum(j, axis=1) < 10  # here

    with pytest.raises(ArgumentError, match="mask_mod of flash_attention is not elementwise") as caught:
        jax.jit(partial(flash_attention, mask_mod=growing))(Q, K, V)
    assert "`cumsum`" in caught.value.got and "# here" in caught.value.loc.snippet()


@pytest.mark.one_backend
@pytest.mark.parametrize("mod", [lambda s, b, n, i, j: s / s.shape[1], lambda s, b, n, i, j: s * s.size])
def test_the_size_of_a_tile_is_no_number(mod: Callable[..., Any]) -> None:
    with pytest.raises(ArgumentError, match="not elementwise") as caught:
        flash_attention(Q, K, V, score_mod=mod)  # this line
    assert "shape of an argument" in caught.value.got and "# this line" in caught.value.loc.snippet()


# --- what does not ----------------------------------------------------------------------------------------------------


def looped(s: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
    return jax.lax.fori_loop(0, 3, lambda _, s: jnp.sin(s) + 0.1, s)


def branched(s: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
    return jnp.where(n == 0, jax.nn.silu(s), jax.lax.cond(True, jnp.negative, jnp.abs, s) * 0.5)


def closed(s: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
    return s + jnp.asarray(TABLE)[0, 2] * jnp.take(jnp.asarray(TABLE)[1], n)


def jitted(s: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
    return jax.jit(lambda s: jnp.where(s > 0, jax.nn.gelu(s), -(jnp.abs(s) ** 1.5)) // 0.125 * 0.125 + s)(s)


def clamped(s: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
    return jnp.clip(s, -2, 2) + jnp.minimum(j // 4, 3) * 0.1 + jnp.full_like(s, 0.5) - (i % 3) * n


def read(table: Any, rows: Any, s: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
    return s * rows[n, i] + table[i, j] / 35


ALONE = {
    "looped": looped,
    "branched": branched,
    "closed": closed,
    "jitted": jitted,
    "clamped": clamped,
    "read": Partial(read, TABLE, TABLE[:2, :5] / 10),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", ALONE)
def test_elementwise_functions_do_not_see_blocks(name: str, backend: str) -> None:
    if backend == "mosaic":
        pytest.skip("needs a backend that is not interpreted")
    one, other = (
        flash_attention(Q, K, V, score_mod=ALONE[name], block_q=block_q, block_k=block_k)
        for block_q, block_k in ((5, 7), (2, 4))
    )
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(one, reference(Q, K, V, score_mod=ALONE[name])[0], rtol=1e-4, atol=1e-5)


UNARY: list[Callable[..., Any]] = [jnp.sin, jnp.tanh, jnp.abs, jnp.cos, jax.nn.relu, lambda s: s * 0.5]
BINARY: list[Callable[..., Any]] = [jnp.add, jnp.maximum, jnp.multiply, lambda s, x: jnp.where(s > x, s, -x)]
MIXING: list[Callable[..., Any]] = [
    lambda s: s - s.mean(),
    lambda s: jnp.cumsum(s, 0) * 0.1,
    lambda s: s.max(0, keepdims=True) - s,
    lambda s: s[:, ::-1],
]


@pytest.mark.one_backend
@settings(max_examples=settings().max_examples // 6)
@given(data=st.data())
def test_random_functions_do_not_see_blocks_or_are_refused(data: st.DataObject) -> None:
    pytest.importorskip("llvmlite", reason="needs llvmlite")
    unary = data.draw(st.lists(st.sampled_from(UNARY), min_size=1, max_size=3))
    binary = data.draw(st.lists(st.sampled_from(BINARY), max_size=2))
    mixing = data.draw(st.lists(st.sampled_from(MIXING), max_size=1))

    def mod(s: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
        for function in (*unary, *mixing):
            s = function(s)
        for function, x in zip(binary, ((i - j) * 0.1, n + j * 0.01), strict=False):
            s = function(s, x)
        return s

    def attend(block: int) -> Any:
        return flash_attention(Q, K, V, score_mod=mod, block_q=block, block_k=block, target="cpu:llvm")

    if mixing:
        with pytest.raises(ArgumentError, match="not elementwise"):
            attend(8)
    else:
        np.testing.assert_allclose(attend(8), attend(3), rtol=1e-5, atol=1e-5)


# --- what does not count ----------------------------------------------------------------------------------------------

QUERIES, KEYS = 130, 140


def spoiled(bad: float, slopes: Any, s: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
    """`bad` where j > i + 3, and at queries and keys that do not exist."""
    there = (j <= i + 3) & (i < QUERIES) & (j < KEYS)
    return s + slopes[n] * jnp.where(there, (i - j) / 8, bad)


def spoiled_scale(bad: float, slopes: Any, s: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
    """A factor that is `bad` there, and so are derivatives of each order."""
    there = (j <= i + 3) & (i < QUERIES) & (j < KEYS)
    return jnp.sin(s) * jnp.where(there, 1.0, bad) * slopes[n] + jnp.where(there, 0.0, bad) * s * s


SPOILED = [
    (spoiled, np.inf),
    (spoiled_scale, np.nan),
    *(pytest.param(mod, bad, marks=pytest.mark.slow) for mod in (spoiled, spoiled_scale) for bad in (1e30, -np.inf)),
]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("mod", "bad"), SPOILED)
def test_what_a_function_is_elsewhere_changes_no_gradient(mod: Callable[..., Any], bad: float, backend: str) -> None:
    queries, keys = (QUERIES, KEYS) if backend in ("xla", "llvm") else (19, 23)
    q, k, v = normal((1, queries, 2, 8), (1, keys, 1, 8), (1, keys, 1, 8))
    statics = {"window": (None, 3)}

    def of(bad: float) -> Featured:
        return Featured(q, k, v, {"score_mod": Partial(partial(mod, bad), np.float32([0.5, 0.25]))}, statics)

    judge_all(grads(ATTEND, of(bad), block_q=32, block_k=48, backward_block_q=48, backward_block_k=32), of(0.5))


SECOND: dict[str, Callable[..., Any]] = {
    "reverse over reverse": lambda f: jax.grad(lambda x: jnp.vdot(jax.grad(f)(x)[0], jnp.cos(x[0]))),
    "forward over reverse": lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (jax.tree.map(jnp.cos, x),))[1],
    "reverse over forward": lambda f: jax.grad(lambda x: jax.jvp(f, (x,), (jax.tree.map(jnp.cos, x),))[1]),
}


@pytest.mark.sweep(3)
@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("mode", "mod", "bad"),
    [
        ("reverse over reverse", spoiled, np.inf),
        ("forward over reverse", spoiled_scale, np.nan),
        *(
            pytest.param(mode, mod, bad, marks=pytest.mark.slow)
            for mode in SECOND
            for mod in (spoiled, spoiled_scale)
            for bad in (np.inf, 1e30)
        ),
    ],
)
def test_what_a_function_is_elsewhere_changes_no_second_derivative(
    mode: str, mod: Callable[..., Any], bad: float
) -> None:
    """Queries that are no multiple of a portion of the definition, and masked pairs: no 0 times infinity."""
    pytest.importorskip("llvmlite", reason="needs llvmlite")
    with jax.enable_x64(True):
        arrays = normal((2,), (1, QUERIES, 2, 8), (1, KEYS, 1, 8), (1, KEYS, 1, 8), dtype=np.float64)

        def loss(attend: Callable[..., Any], bad: float, x: Any) -> jax.Array:
            out, logsumexp = attend(*x[1:], score_mod=Partial(partial(mod, bad), x[0]), window=(None, 3))
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(logsumexp))

        native = partial(ATTEND, target="cpu:llvm")
        expected = jax.jit(SECOND[mode](partial(loss, reference, 0.5)))(arrays)
        found = jax.jit(SECOND[mode](partial(loss, native, bad)))(arrays)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


def biased(slopes: Any, s: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
    return s + slopes[n] * (i - j)


@pytest.mark.one_backend
@pytest.mark.parametrize(
    "mode", ["reverse over reverse", *(pytest.param(mode, marks=pytest.mark.slow) for mode in list(SECOND)[1:])]
)
@pytest.mark.slow
def test_second_derivatives_of_slopes_with_many_features(mode: str) -> None:
    """Grouped heads, a window, a softcap, sinks, slopes, a traced offset; checkpointed by names, mapped and scanned."""
    pytest.importorskip("llvmlite", reason="needs llvmlite")
    with jax.enable_x64(True):
        arrays = normal((6,), (6,), (2, QUERIES, 6, 8), (2, KEYS, 3, 8), (2, KEYS, 3, 12), dtype=np.float64)
        names = jax.checkpoint_policies.save_only_these_names("flash_attention_out", "flash_attention_logsumexp")

        def loss(attend: Callable[..., Any], x: Any, offset: Any) -> jax.Array:
            slopes, sinks, *qkv = x

            @partial(jax.checkpoint, policy=names)
            def one(q: Any, k: Any, v: Any) -> jax.Array:
                mod = Partial(biased, jnp.abs(slopes))
                out, _ = attend(q, k, v, score_mod=mod, sinks=sinks, softcap=8.0, window=(None, 4), q_offset=offset)
                return jnp.sum(jnp.sin(out))

            def step(total: jax.Array, _: Any) -> Any:
                return total + jax.vmap(one)(*qkv).sum(), None

            return jax.lax.scan(step, jnp.zeros(()), None, 2)[0]

        native = partial(ATTEND, target="cpu:llvm", block_q=8, block_k=8)
        found, expected = (
            jax.jit(lambda x, offset, f=f: SECOND[mode](lambda y: loss(f, y, offset))(x))(arrays, jnp.int32(2))
            for f in (native, reference)
        )
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8)
