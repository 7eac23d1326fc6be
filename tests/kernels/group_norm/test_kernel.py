import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilekern as tk
from tests.kernels.programs import arrays_of
from tilekern.errors import ArgumentError
from tilekern.kernels.group_norm import api, group_norm, reference
from tilekern.kernels.group_norm.cases import CASES, LARGE, Case
from tilekern.kernels.group_norm.kernel import group_norm_forward
from tilekern.kernels.group_norm.parts import group_norm_moments
from tilekern.testing import arrays, assert_close, in_float64, lengths

FLOATS = ("float32", "bfloat16", "float16", "float64")
BLOCKS = ({}, {"block_s": 8, "block_g": 2}, {"block_s": 3}, {"block_s": 64, "block_g": 1})

naive = jax.jit(reference, static_argnames=("num_groups", "group_size", "batch_dims", "eps", "activation", "dtype"))


def check(x: Any, weight: Any, bias: Any, *, blocks: dict[str, int] | None = None, **keywords: Any) -> None:
    with jax.enable_x64(x.dtype == np.float64):
        out = group_norm(x, weight, bias, **keywords, **(blocks or {}))
        low = naive(x, weight, bias, **keywords, dtype=x.dtype)
    others = [a for a in (weight, bias) if a is not None]

    def oracle(x: Any, *given: Any) -> Any:
        found = iter(given)
        return reference(x, *(None if a is None else next(found) for a in (weight, bias)), **keywords)

    assert_close(out, in_float64(oracle, x, *others), low, length=x.size)


@pytest.fixture(params=[False, True], ids=["whole", "parts"])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """True and False: samples that count as too large for one program, and others."""
    if request.param:
        monkeypatch.setattr(api, "ONE_PROGRAM", 0)
    return request.param


@pytest.mark.parametrize("dtype", FLOATS)
@settings(max_examples=3)
@given(
    data=st.data(),
    positions=lengths(16),
    groups=st.integers(1, 4),
    size=st.sampled_from([1, 3, 4, 10]),
    blocks=st.sampled_from(BLOCKS),
)
def test_floats(dtype: str, data: st.DataObject, positions: int, groups: int, size: int, blocks: Any) -> None:
    columns = groups * size
    x = data.draw(arrays(jnp.dtype(dtype), (2, positions, columns)))
    weight, bias = (data.draw(st.none() | arrays(jnp.dtype(d), (columns,))) for d in (dtype, "float32"))
    activation = data.draw(st.sampled_from([None, "silu"]))
    eps = data.draw(st.sampled_from([1e-5, 0.5]))
    check(x, weight, bias, blocks=blocks, num_groups=groups, eps=eps, activation=activation)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@given(data=st.data(), blocks=st.sampled_from(BLOCKS))
@settings(max_examples=3)
def test_nan_and_infinities_stay_in_their_group(dtype: str, data: st.DataObject, blocks: dict[str, int]) -> None:
    specials = [np.inf, -np.inf, np.nan, 0.0]
    x, weight, bias = (data.draw(arrays(jnp.dtype(dtype), shape, specials)) for shape in ((2, 7, 9), (9,), (9,)))
    check(x, weight, bias, blocks=blocks, num_groups=3)


@pytest.mark.parametrize("blocks", BLOCKS[:3])
@given(data=st.data(), mean=st.sampled_from([100.0, -1e4]))
@settings(max_examples=2)
def test_a_mean_that_is_large_against_the_deviation(data: st.DataObject, mean: float, blocks: dict[str, int]) -> None:
    check(data.draw(arrays(np.float32, (2, 31, 6))) + np.float32(mean), None, None, blocks=blocks, num_groups=2)


@pytest.mark.parametrize(
    ("shape", "batch_dims"),
    [((6,), 0), ((3, 6), 1), ((2, 3, 6), 2), ((2, 3, 4, 5, 6), 2), ((2, 0, 6), 1), ((0, 3, 6), 1), ((3, 4, 6), 0)],
)
@pytest.mark.usefixtures("parts")
def test_any_rank(shape: tuple[int, ...], batch_dims: int) -> None:
    random = np.random.default_rng(0)
    x, weight, bias = (random.standard_normal(s).astype(np.float32) for s in (shape, (6,), (6,)))
    keywords = {"group_size": 2, "batch_dims": batch_dims, "activation": "silu"}
    if x.size:
        check(x, weight, bias, blocks={"block_s": 4}, **keywords)
    else:
        assert group_norm(x, weight, bias, **keywords).shape == shape


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", [case.small() for case in CASES], ids=lambda case: case.name)
def test_small_cases(case: Case, dtype: str) -> None:
    x, weight, bias = case.arrays(jax.random.key(0), dtype)
    check(x, weight, bias, **case.keywords, blocks={"block_s": 16})


@pytest.mark.parametrize("name", ["vae_decoder_512", "sdxl_128"])
def test_samples_in_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and gradients, also by parts of several tiles, of which the last one is short."""
    monkeypatch.setattr(api, "ONE_PROGRAM", 0)
    (case,) = (case.small() for case in LARGE if case.name == name)
    given = case.arrays(jax.random.key(0), "float32")

    def both(function: Any, *arrays: Any) -> Any:
        out, pull = jax.vjp(partial(function, **case.keywords), *arrays)
        return out, *pull(jnp.cos(out))

    oracle, low = in_float64(partial(both, reference), *given), jax.jit(partial(both, reference))(*given)
    for found, exact, naive in zip(jax.jit(partial(both, group_norm))(*given), oracle, low, strict=True):
        assert_close(found, exact, naive, length=given[0].size, factor=3)


@pytest.mark.parametrize("tiles", [1, 3])
def test_moments_of_parts(tiles: int) -> None:
    x = np.random.default_rng(0).standard_normal((2, 21, 5)).astype(np.float32) + 50
    means, squares = group_norm_moments(x, part=4 * tiles, block_s=4, block_c=4)
    parts = [x[:, n : n + 4 * tiles] for n in range(0, 21, 4 * tiles)]
    exact = [p.mean(axis=1, dtype=np.float64) for p in parts]
    assert_close(means, np.stack(exact, 1), np.stack([p.mean(axis=1) for p in parts], 1), length=21)
    of_squares = [((p - m[:, None]) ** 2).sum(axis=1) for p, m in zip(parts, exact, strict=True)]
    assert_close(squares, np.stack(of_squares, 1), np.stack([p.shape[1] * p.var(axis=1) for p in parts], 1), length=21)


@pytest.mark.one_backend
@pytest.mark.parametrize("case", (*CASES, *LARGE), ids=lambda case: case.name)
def test_cases_trace(case: Case) -> None:
    x, weight, bias = jax.eval_shape(partial(case.arrays, dtype=jnp.bfloat16), jax.random.key(0))
    assert jax.eval_shape(partial(group_norm, **case.keywords), x, weight, bias) == x
    assert (case in LARGE) == (x.size // case.batch * 2 > api.ONE_PROGRAM)


@pytest.mark.one_backend
@settings(max_examples=4)
@given(data=st.data(), block_s=st.sampled_from([4, 16]), activation=st.sampled_from([None, "silu"]))
def test_the_interpreter_agrees(data: st.DataObject, block_s: int, activation: str | None) -> None:
    inputs = tuple(data.draw(arrays(np.float32, s)) for s in ((2, 9, 12), (12,), (12,)))
    keywords = {"eps": 1e-6, "activation": activation}
    traced = group_norm_forward.trace(*inputs, size=3, **keywords, block_s=block_s, block_g=2)
    naive = partial(reference, num_groups=4, **keywords)
    assert_close(tk.interpret(traced)(*inputs), in_float64(naive, *inputs), naive(*inputs), length=108)


@pytest.mark.one_backend
def test_gradients_have_no_wide_copy_of_narrow_arrays(parts: bool) -> None:
    x, weight = jnp.ones((2, 40, 12), jnp.bfloat16), jnp.ones(12, jnp.bfloat16)

    def gradient(x: Any, weight: Any) -> Any:
        out, pull = jax.vjp(partial(group_norm, num_groups=3, activation="silu"), x, weight)
        return pull(out)

    made = list(arrays_of(jax.make_jaxpr(gradient)(x, weight).jaxpr))
    assert made and all(a.dtype == jnp.bfloat16 for a in made if a.size >= x.size)


@pytest.mark.one_backend
@pytest.mark.parametrize("target", ["cpu:xla", "cpu:llvm"])
def test_gradients_are_the_same_bits_each_time(target: str, parts: bool) -> None:
    if target == "cpu:llvm":
        pytest.importorskip("llvmlite", reason="needs llvmlite")
    random = np.random.default_rng(0)
    x, weight, cotangent = (random.standard_normal(s, np.float32) for s in ((3, 999, 24), (24,), (3, 999, 24)))

    @jax.jit
    def run(x: Any, weight: Any, cotangent: Any) -> Any:
        return jax.vjp(partial(group_norm, num_groups=6, target=target), x, weight)[1](cotangent)

    first = run(x, weight, cotangent)
    for _ in range(4):
        for a, b in zip(first, run(x, weight, cotangent), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("x", "weight", "bias", "got"),
    [
        (jnp.zeros((2, 32), jnp.int32), None, None, "x = int32[2, 32], weight = None"),
        (jnp.zeros((2, 32)), jnp.zeros(2), None, "x = float32[2, 32], weight = float32[2]"),
        (jnp.zeros((2, 32)), None, jnp.zeros((1, 32)), "bias = float32[1, 32]"),
        (jnp.zeros(()), None, None, "x = float32[]"),
    ],
)
def test_arrays_that_do_not_fit(x: Any, weight: Any, bias: Any, got: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(got)) as caught:
        group_norm(x, weight, bias)  # here
    assert "# here" in caught.value.loc.snippet()


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("keywords", "got"),
    [
        ({}, "num_groups = None, group_size = None"),  # 32 groups of 12 channels
        ({"num_groups": 5}, "num_groups = 5"),
        ({"num_groups": 0}, "num_groups = 0"),
        ({"num_groups": 3, "group_size": 4}, "num_groups = 3, group_size = 4"),
        ({"group_size": 2.0}, "group_size = 2.0"),
        ({"num_groups": 3, "batch_dims": 3}, "batch_dims = 3"),
        ({"num_groups": 3, "batch_dims": -1}, "batch_dims = -1"),
        ({"num_groups": 3, "activation": "gelu"}, "activation = 'gelu'"),
    ],
)
def test_keywords_that_do_not_fit(keywords: dict[str, Any], got: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(got)) as caught:
        group_norm(jnp.zeros((2, 5, 12)), **keywords)  # here
    assert "# here" in caught.value.loc.snippet()
