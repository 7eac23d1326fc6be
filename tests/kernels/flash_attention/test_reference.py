"""The definition itself: against loops over rows in NumPy, and finite differences."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from tests.kernels.flash_attention.features import (
    Featured,
    cotangents,
    features,
    grads,
    in_float64,
    judge_all,
    loss_of,
    values,
)
from tilekern.kernels.flash_attention.reference import reference_with_logsumexp as reference
from tilekern.lang.bits import random_bits
from tilekern.testing import assert_close

pytestmark = pytest.mark.one_backend


# --- values ---------------------------------------------------------------------------------------------------------


@settings(max_examples=settings().max_examples // 3)  # each compiles a program
@given(features("float64", longest=9))
def test_all_features_at_once(featured: Featured) -> None:
    found = values(reference, featured)
    for name, expected in zip(("out", "logsumexp"), by_rows(featured), strict=True):
        length = featured.q.shape[-1] + featured.k.shape[-3]
        assert_close(found[name], expected, expected, length=length)


@settings(max_examples=settings().max_examples // 10)
@given(st.sampled_from(["float32", "bfloat16", "float16"]).flatmap(lambda dtype: features(dtype, longest=9)))
def test_of_narrow_inputs_scores_are_in_float32(featured: Featured) -> None:
    found = values(reference, featured)
    assert found["out"].dtype == featured.q.dtype and found["logsumexp"].dtype == np.float32
    judge_all(found, featured)


def test_leading_dims_broadcast_one_by_one() -> None:
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((2, 3, 5, 4, 8)) for _ in range(3))
    arrays = {
        "bias": random.standard_normal((2, 1, 1, 5, 5)),
        "mask": random.random((1, 3, 4, 1, 5)) < 0.7,
        "q_offset": random.integers(-2, 3, (2, 3)),
        "segment_ids": random.integers(0, 2, (2, 3, 5)),
        "kv_lengths": random.integers(2, 6, (2, 3)),
    }
    with jax.enable_x64(True):
        found = reference(q, k, v, **arrays, causal=True)
    flat = {name: x.reshape(6, *x.shape[2:]) for name, x in arrays.items() if name not in ("bias", "mask")}
    for name in ("bias", "mask"):
        whole = np.broadcast_to(arrays[name], (2, 3, 4, 5, 5))
        flat[name] = whole.reshape(6, 4, 5, 5)
    expected = by_rows(Featured(*(x.reshape(6, 5, 4, 8) for x in (q, k, v)), flat, {"causal": True}))
    for one, other in zip(found, expected, strict=True):
        other = other.reshape(one.shape)
        assert_close(one, other, other, length=13)


@pytest.mark.parametrize("rate", [0.25, 0.999, 1.0])
def test_dropout_keeps_the_mean(rate: float) -> None:
    q = k = np.zeros((64, 1, 4), np.float32)
    v = np.ones((64, 1, 1), np.float32)
    out, logsumexp = reference(q, k, v, dropout_rate=rate, dropout_key=jax.random.key(0))
    kept = np.asarray(out, np.float64).sum() * (1 - rate) * 64
    deviation = 64 * math.sqrt(rate * (1 - rate))  # of the number of weights that are kept, of 64 * 64
    assert abs(kept - 64 * 64 * (1 - rate)) <= 4 * deviation
    np.testing.assert_array_equal(logsumexp, reference(q, k, v)[1])


def test_offsets_that_exceed_all_positions() -> None:
    q = k = v = np.ones((5, 1, 4), np.float32)
    for offset, attends in ((2**31 - 1, True), (-(2**31), False)):
        _, logsumexp = reference(q, k, v, causal=True, q_offset=offset)
        assert np.isneginf(logsumexp).all() != attends
        _, logsumexp = reference(q, k, v, window=(3, 3), q_offset=offset)
        assert np.isneginf(logsumexp).all()


def by_rows(featured: Featured) -> tuple[Any, Any]:
    """Out and logsumexp in float64 by the words of the documentation, one row after the other."""
    batch, (queries, heads, _), keys = featured.q.shape[:-3], featured.q.shape[-3:], featured.k.shape[-3]
    options = {**featured.arrays, **featured.statics}
    shape = math.prod(batch), heads, queries, keys
    flat = {"q": featured.q, "k": featured.k, "v": featured.v}
    flat = {name: x.reshape(shape[0], *x.shape[-3:]) for name, x in flat.items()}
    for name in ("bias", "mask"):
        if name in options:
            options[name] = np.broadcast_to(options[name], (*batch, *shape[1:])).reshape(shape)
    for name in ("q_lengths", "kv_lengths", "q_offset"):
        if name in options:
            options[name] = np.broadcast_to(options[name], batch).reshape(-1)
    if "segment_ids" in options:
        ids = options["segment_ids"]
        options["segment_ids"] = [x.reshape(shape[0], -1) for x in (ids if isinstance(ids, tuple) else (ids, ids))]
    if "dropout_key" in options:
        key = options["dropout_key"]
        data = key if isinstance(key, np.ndarray) else jax.random.key_data(key)
        positions = np.indices(shape, np.int32)
        positions[:2] *= not options.get("dropout_broadcast", False)
        options["bits"] = np.asarray(random_bits(data, *positions))

    logsumexp = np.zeros((shape[0], queries, heads))
    out = np.zeros((*logsumexp.shape, featured.v.shape[-1]))
    for b, n, i in np.ndindex(shape[:3]):
        out[b, i, n], logsumexp[b, i, n] = one_row(flat, options, b, n, i)
    return out.reshape(*batch, *out.shape[1:]), logsumexp.reshape(*batch, queries, heads)


def one_row(flat: dict[str, Any], options: dict[str, Any], b: int, n: int, i: int) -> tuple[Any, Any]:
    group = flat["q"].shape[2] // flat["k"].shape[2]
    q, k, v = flat["q"][b, i, n], flat["k"][b, :, n // group], flat["v"][b, :, n // group]
    sink = options["sinks"][n].astype(np.float64) if "sinks" in options else -np.inf
    s = {int(j): score(q, k[j], options, b, n, i, j) for j in np.arange(len(k)) if attends(options, b, n, i, j)}
    s = {j: x for j, x in s.items() if x > -np.inf}
    if not s:
        return 0, sink
    top = max(*s.values(), sink)
    logsumexp = top + np.log(np.exp(sink - top) + sum(np.exp(x - top) for x in s.values()))
    rate = options.get("dropout_rate", 0.0)
    out = np.zeros(v.shape[-1])
    for j, x in s.items():
        if not rate or options["bits"][b, n, i, j] >= np.uint32(rate * 2**32):
            out += np.exp(x - logsumexp) / (1 - rate) * v[j]
    return out, logsumexp


def score(q: Any, k: Any, options: dict[str, Any], b: int, n: int, i: int, j: int) -> Any:
    s = options.get("scale", 1 / np.sqrt(len(q))) * (q @ k)
    if "bias" in options:
        s += options["bias"][b, n, i, j].astype(np.float64)
    if "softcap" in options:
        s = options["softcap"] * np.tanh(s / options["softcap"])
    return options["score_mod"](s, b, n, i, j) if "score_mod" in options else s


def attends(options: dict[str, Any], b: int, n: int, i: int, j: int) -> bool:
    offset = options["q_offset"][b] if "q_offset" in options else 0
    left, right = options.get("window", (None, None))
    rules = [
        not options.get("causal") or j <= i + offset,
        left is None or j >= i + offset - left,
        right is None or j <= i + offset + right,
        "mask" not in options or options["mask"][b, n, i, j],
        "q_lengths" not in options or i < options["q_lengths"][b],
        "kv_lengths" not in options or j < options["kv_lengths"][b],
        "mask_mod" not in options or options["mask_mod"](b, n, i, j),
    ]
    if "segment_ids" in options:
        of_queries, of_keys = options["segment_ids"]
        rules.append(of_queries[b, i] == of_keys[b, j])
    return all(rules)


# --- derivatives ----------------------------------------------------------------------------------------------------


@settings(max_examples=settings().max_examples // 12)  # each compiles many programs
@given(features("float64", longest=5))
@pytest.mark.slow
def test_derivatives_are_finite_differences(featured: Featured) -> None:
    check_derivatives(featured, modes=("fwd", "rev"))


def check_derivatives(featured: Featured, modes: Sequence[str] = ("rev",)) -> None:
    """The first ones, and the second ones."""
    loss, (floats, *rest), _ = loss_of(reference, featured)
    with jax.enable_x64(True):
        compiled = jax.jit(lambda floats: loss(floats, *rest)[0])
        check_grads(compiled, (floats,), order=2, modes=modes)


def small(**arrays: Any) -> Featured:
    """T = 3, S = 4, B = 2."""
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((2, length, heads, 4)) for length, heads in ((3, 2), (4, 1), (4, 1)))
    statics = {name: arrays.pop(name) for name in list(arrays) if not hasattr(arrays[name], "dtype")}
    return Featured(q, k, v, arrays, statics)


MIDDLE = np.array([True, False, True])[:, None]
"""The second query attends to nothing."""

DEAD = {
    "mask": ({"mask": MIDDLE[None, None]}, [1]),
    "bias": ({"bias": np.where(MIDDLE, 0, -np.inf)[None, None]}, [1]),
    "causal": ({"causal": True, "q_offset": np.array(-2)}, [0, 1]),
    "window": ({"window": (0, 0), "q_offset": np.array([2, 2])}, [2]),
    "mask_mod": ({"mask_mod": lambda b, n, i, j: (i != 1) & (j >= 0)}, [1]),
    "kv_lengths": ({"kv_lengths": np.array([0, 0])}, [0, 1, 2]),
    "q_lengths": ({"q_lengths": np.array([1, 1])}, [1, 2]),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("sinks", [None, np.array([0.5, -1.0])], ids=["", "sinks"])
@pytest.mark.parametrize("name", DEAD)
def test_a_row_that_attends_to_nothing(name: str, sinks: Any) -> None:
    options, rows = DEAD[name]
    featured = small(**options, **({} if sinks is None else {"sinks": sinks}))
    found = grads(reference, featured)
    assert all(np.isfinite(x).all() for key, x in found.items() if key.startswith("gradient"))
    assert (found["out"][:, rows] == 0).all() and (found["gradient of q"][:, rows] == 0).all()
    assert (found["logsumexp"][:, rows] == (-np.inf if sinks is None else sinks)).all()
    alive = [row for row in range(3) if row not in rows]
    assert np.isfinite(found["logsumexp"][:, alive]).all() and (found["gradient of q"][:, alive] != 0).all()
    if sinks is not None and not alive:
        expected = cotangents(featured)[1].sum(axis=(0, 1))
        assert_close(found["gradient of sinks"], expected, expected, length=6)
    if sinks is None:
        check_derivatives(featured)


def test_keys_of_minus_infinity_are_masked() -> None:
    masked = np.random.default_rng(1).random((2, 2, 3, 4)) < 0.4
    by_bias = grads(reference, small(bias=np.where(masked, -np.inf, 0.0)))
    by_mask = grads(reference, small(mask=~masked))
    for name, expected in by_mask.items():
        assert_close(by_bias[name], expected, expected, length=8)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "options",
    [{}, {"softcap": 2.0}, {"score_mod": lambda s, b, n, i, j: s * abs(s)}],
    ids=["plain", "softcap", "score_mod"],
)
def test_padding_changes_nothing(options: dict[str, Any]) -> None:
    clean = small(q_lengths=np.array([1, 3]), kv_lengths=np.array([4, 2]), **options)
    q, k, v = (x.copy() for x in (clean.q, clean.k, clean.v))
    q[0, 1:], k[1, 2:], v[1, 2:] = np.nan, np.inf, np.nan
    expected, found = grads(reference, clean), grads(reference, replace(clean, q=q, k=k, v=v))
    for name, unspoiled in expected.items():
        np.testing.assert_array_equal(found[name], unspoiled)
    assert (found["gradient of q"][0, 1:] == 0).all()
    assert all((found[f"gradient of {name}"][1, 2:] == 0).all() for name in "kv")
    check_derivatives(replace(clean, q=q, k=k, v=v))


def test_masked_scores_have_no_part_in_derivatives() -> None:
    bias = np.where(MIDDLE, 0.5, np.nan)[None, None] + np.zeros((1, 1, 1, 4))
    for options in ({"softcap": 2.0}, {"score_mod": lambda s, b, n, i, j: s * s}):
        found = grads(reference, small(mask=MIDDLE[None, None], bias=bias, **options))
        assert all(np.isfinite(x).all() for name, x in found.items() if name.startswith("gradient"))


def test_both_kinds_of_keys_of_dropout() -> None:
    raw = small(dropout_key=np.array([0, 7], np.uint32), dropout_rate=0.5)
    typed = small(dropout_key=jax.random.key(7, impl="threefry2x32"), dropout_rate=0.5)
    for one, other in zip(*(values(reference, featured).values() for featured in (raw, typed)), strict=True):
        np.testing.assert_array_equal(one, other)
    assert in_float64(typed).arrays == typed.arrays


def test_a_wrong_result_is_found() -> None:
    """`judge_all` is sharp enough for each gradient."""
    featured = small(bias=np.zeros((1, 2, 1, 4)), sinks=np.ones(2))
    featured = jax.tree.map(lambda x: x.astype(np.float32), featured.inputs)
    featured = Featured(*(featured.pop(name) for name in "qkv"), featured)
    good = grads(reference, featured)
    judge_all(good, featured)
    for name in good:
        with pytest.raises(AssertionError, match="too far from the oracle"):
            judge_all({**good, name: good[name] * jnp.float32(1 + 1e-4)}, featured)
