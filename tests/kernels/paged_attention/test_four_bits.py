"""Caches of two 4-bit numbers a byte: a key in the low half, its value in the high half."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.kernels.paged_attention import test_kernel, test_pages
from tests.kernels.paged_attention.test_pages import PAGE, PAGES, SCALES, copies, same
from tilekern.errors import ArgumentError
from tilekern.kernels.paged_attention import (
    copy_pages,
    paged_attention,
    ragged_paged_attention,
    reference,
    write_pages,
    write_reference,
)
from tilekern.kernels.quantization import quantize
from tilekern.testing import assert_close, in_float64

DTYPES = ["int4", "float4_e2m1fn"]
GROUPS = test_pages.GROUPS


def packed(keys: Any, values: Any, dtype: str) -> np.ndarray:
    """Bytes of keys and values of one shape, as the documentation makes them."""
    pairs = jnp.stack([jnp.asarray(x).astype(dtype) for x in (keys, values)], axis=-1)
    return np.array(jax.lax.bitcast_convert_type(pairs, jnp.uint8))


def problem(dtype: str, of_query: str = "float32", *, page: int = 8, width: int = 16) -> tuple[list[Any], np.ndarray]:
    """The arguments of `ragged_paged_attention`, and True for each key that nothing needs; its bytes are random."""
    arguments, _ = test_kernel.problem(dtype=of_query, page=page)
    arguments[0] = arguments[0][..., :width]
    pages = arguments[1][..., :width].astype(np.float32)
    unused = np.isnan(pages).all(axis=(2, 3))
    numbers = np.nan_to_num(pages) * (3 if dtype == "int4" else 2)
    pool = packed(np.clip(numbers[:, :, ::2], -8, 7), np.clip(numbers[:, :, 1::2], -8, 7), dtype)
    pool[unused] = np.random.default_rng(2).integers(0, 256, pool[unused].shape)
    arguments[1] = pool
    return arguments, unused


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", ["one", "heads", "keys"])
def test_attention_to_a_cache_of_four_bits(dtype: str, scales: str) -> None:
    """Scales of keys that nothing needs are NaN."""
    arguments, unused = problem(dtype, "bfloat16" if scales == "heads" else "float32")
    random = np.random.default_rng(1)
    shape = {"one": (), "heads": (GROUPS,), "keys": (*unused.shape, GROUPS)}[scales]
    scale, other = random.uniform(0.2, 0.6, (2, *shape)).astype(np.float32)
    if scales == "keys":
        scale[unused] = other[unused] = np.nan
    test_kernel.check(arguments, key_scale=scale, value_scale=other, cache_dtype=dtype, parts=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("page", "width"), [(1, 16), (6, 15), (48, 1)])
def test_pages_and_odd_widths(dtype: str, page: int, width: int) -> None:
    arguments, _ = problem(dtype, page=page, width=width)
    test_kernel.check(arguments, key_scale=0.3, value_scale=0.3, cache_dtype=dtype)


@pytest.mark.parametrize("of_query", ["bfloat16", "float32"])
def test_bytes_hold_keys_low_and_values_high(of_query: str) -> None:
    """The result is that of a cache of int8 with the same numbers, interleaved by head."""
    arguments, _ = problem("int4", of_query)
    low, high = ((arguments[1].view(np.int8) << shift) >> 4 for shift in (4, 0))
    wide = np.stack([low, high], axis=3).reshape(*low.shape[:2], -1, low.shape[3])
    scales = {"key_scale": 0.25, "value_scale": 0.5}
    found = ragged_paged_attention(*arguments, **scales, cache_dtype="int4")
    expected = ragged_paged_attention(arguments[0], wide, *arguments[2:], **scales)
    np.testing.assert_array_equal(found, expected)


# --- writes ----------------------------------------------------------------------------------------------------------


def problem_of_write(seed: int = 0) -> list[Any]:
    """The arguments of `write_pages`, with a cache of random bytes."""
    _, *arguments = test_pages.problem("bfloat16", "float32", seed=seed)
    return [np.random.default_rng(seed).integers(0, 256, (PAGES, PAGE, GROUPS, 8), np.uint8), *arguments]


@pytest.mark.one_backend
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_write_quantises_as_its_definition_does(dtype: str, scales: str) -> None:
    """Scales of other keys stay, of which some are NaN; so do all bytes of other keys."""
    arguments, shape = problem_of_write(), SCALES[scales]
    random = np.random.default_rng(1)
    key_scale, value_scale = (
        None if shape is None else random.uniform(0.1, 1, shape).astype(np.float32) for _ in range(2)
    )
    if scales == "keys":
        key_scale[0, 1] = np.nan
    keywords = {"key_scale": key_scale, "value_scale": value_scale, "cache_dtype": dtype}
    found = jax.jit(partial(write_pages, **keywords))(*arguments)
    same(found, jax.jit(partial(write_reference, **keywords))(*arguments))
    assert found.kv_pages.dtype == jnp.uint8
    changed = (np.asarray(found.kv_pages) != arguments[0]).any(axis=(2, 3))
    assert changed.sum() <= 3 + 1 + 6


@pytest.mark.one_backend
@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_of_keys_are_those_of_quantize(dtype: str) -> None:
    """Each number, and each scale, bit for bit."""
    cache, keys, values, *tables = problem_of_write()
    keys[0, 0] = 0  # the scale of zeros is 1
    scale = jnp.zeros(SCALES["keys"])
    found = write_pages(cache, keys, values, *tables, key_scale=scale, value_scale=scale, cache_dtype=dtype)
    (of_keys, key_scale), (of_values, value_scale) = (quantize(x, (1, 1, None), dtype=dtype) for x in (keys, values))
    bytes_of_tokens, (lengths, table, starts, _) = packed(of_keys, of_values, dtype), tables
    for s, end in enumerate(starts[1:-1]):
        for t in range(starts[s], end):
            number = lengths[s] - end + t
            if number >= table.shape[1] * PAGE:
                continue
            page, place = table[s, number // PAGE], number % PAGE
            np.testing.assert_array_equal(found.kv_pages[page, place], bytes_of_tokens[t])
            np.testing.assert_array_equal(found.key_scale[page, place], key_scale[t, :, 0])
            np.testing.assert_array_equal(found.value_scale[page, place], value_scale[t, :, 0])


@pytest.mark.one_backend
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_call_with_new_keys_writes_and_then_attends(dtype: str) -> None:
    cache, new_keys, new_values, *tables = problem_of_write()
    query = np.random.default_rng(5).standard_normal((len(new_keys), 6, 8)).astype(new_keys.dtype)
    scales = {"key_scale": 0.5, "value_scale": jnp.full(SCALES["keys"], 0.5), "cache_dtype": dtype}
    new = {"new_keys": new_keys, "new_values": new_values}
    written = write_pages(cache, new_keys, new_values, *tables, **scales)
    out, pages = ragged_paged_attention(query, cache, *tables, **scales, **new)
    same(pages, written)
    expected, pages = reference(query, cache, *tables, **new, **scales)
    same(pages, written)
    after = {"key_scale": 0.5, "value_scale": np.asarray(written.value_scale), "cache_dtype": dtype}
    oracle = in_float64(partial(reference, **after), query, written.kv_pages, *tables)
    assert_close(out, oracle, expected, length=64)


@pytest.mark.one_backend
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_of_decoding_in_place(dtype: str) -> None:
    """A fork of a sequence, then a step of decoding: no copy of the cache, nor of the scales."""

    def step(pages: Any, scale: Any, pairs: Any, query: Any, new: Any, lengths: Any, table: Any) -> Any:
        pages, scale = copy_pages((pages, scale), *pairs)
        scales = {"key_scale": scale, "value_scale": 1.0, "cache_dtype": dtype}
        return paged_attention(query, pages, lengths, table, new_keys=new, new_values=new, **scales)

    pages, scale = jax.ShapeDtypeStruct((512, 16, 2, 64), "uint8"), jax.ShapeDtypeStruct((512, 16, 2), "float32")
    query, new = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((3, 4, 64), (3, 2, 64)))
    pairs, lengths, table = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((2, 5), (3,), (3, 9)))
    run = jax.jit(step, donate_argnums=(0, 1))
    compiled = run.lower(pages, scale, pairs, query, new, lengths, table).compile()
    assert not copies(compiled, "[512,16,2,64]") and not copies(compiled, "[512,16,2]")
    assert compiled.memory_analysis().alias_size_in_bytes == pages.size + 4 * scale.size


@pytest.mark.one_backend
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_devices_divide_the_heads(kind: AxisType) -> None:
    cache, new_keys, new_values, *tables = problem_of_write()
    query = np.random.default_rng(5).standard_normal((len(new_keys), 6, 8)).astype(new_keys.dtype)
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(kind,))
    by_head = [NamedSharding(mesh, PartitionSpec(*(None,) * n, "heads", None)) for n in range(3)]
    arrays = {"query": query, "kv_pages": cache, "new_keys": new_keys, "new_values": new_values}
    placed = {name: jax.device_put(x, by_head[x.ndim - 2]) for name, x in arrays.items()}
    names = ("kv_lens", "page_indices", "cu_q_lens", "num_seqs")
    run = jax.jit(partial(ragged_paged_attention, key_scale=0.5, value_scale=0.5, cache_dtype="int4"))
    with jax.set_mesh(mesh):
        compiled = run.lower(**placed, **dict(zip(names, tables, strict=True))).compile()
        out, pages = compiled(**placed, **dict(zip(names, tables, strict=True)))
    assert not any(name in compiled.as_text() for name in ("all-gather", "all-reduce", "all-to-all", "permute"))
    expected, written = run(**arrays, **dict(zip(names, tables, strict=True)))
    same(pages, written)
    np.testing.assert_allclose(out.astype(np.float32), expected.astype(np.float32), rtol=2**-7, atol=2**-7)


@pytest.mark.one_backend
def test_a_call_is_exported() -> None:
    arguments, _ = problem("float4_e2m1fn")
    run = jax.jit(partial(ragged_paged_attention, cache_dtype="float4_e2m1fn"))
    found = jax.export.deserialize(jax.export.export(run)(*arguments).serialize()).call(*arguments)
    np.testing.assert_allclose(found, run(*arguments), rtol=2e-5, atol=2e-6)


# --- wrong calls -----------------------------------------------------------------------------------------------------

QUERY, BYTES = jnp.ones((2, 4, 8)), jnp.ones((3, 4, 2, 8), jnp.uint8)
ONES, TABLE = jnp.ones(2, int), jnp.zeros((2, 3), int)


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("cache", "dtype", "fix"),
    [
        (BYTES, None, "cast query"),
        (BYTES[:, :, :0], "int4", "cast query"),
        (jnp.ones((3, 4, 4, 8)), "int4", "cast query"),
        ((BYTES, BYTES), "int4", "cast query"),
        (jnp.ones((3, 4, 4, 8), "int4"), None, r"would be copied .*jnp.stack\(\[keys, values\], axis=-1\)"),
        (jnp.ones((3, 4, 4, 8), "float4_e2m1fn"), "float4_e2m1fn", "would be copied"),
    ],
)
def test_wrong_caches(cache: Any, dtype: str | None, fix: str) -> None:
    with pytest.raises(ArgumentError, match="the arrays of paged_attention do not fit") as error:
        paged_attention(QUERY, cache, ONES, TABLE, cache_dtype=dtype)
    assert "uint8[pages, page, K, H]" in error.value.expected
    assert error.match("(?s)" + fix)
    with pytest.raises(ArgumentError, match="the arrays of write_pages do not fit"):
        write_pages(cache, QUERY[:, :2], QUERY[:, :2], ONES, TABLE, cache_dtype=dtype)


@pytest.mark.one_backend
@pytest.mark.parametrize("dtype", ["int8", "uint4", "nothing", 4])
def test_wrong_dtypes(dtype: Any) -> None:
    for call in (
        lambda: paged_attention(QUERY, BYTES, ONES, TABLE, cache_dtype=dtype),
        lambda: ragged_paged_attention(QUERY, BYTES, ONES, TABLE, jnp.arange(3), cache_dtype=dtype),
        lambda: write_pages(BYTES, QUERY[:, :2], QUERY[:, :2], ONES, TABLE, cache_dtype=dtype),
    ):
        with pytest.raises(ArgumentError, match="cannot take this cache_dtype") as error:
            call()
        assert "'int4' or 'float4_e2m1fn'" in error.value.expected and repr(dtype) in error.value.got


@pytest.mark.one_backend
def test_values_of_another_width_are_refused() -> None:
    with pytest.raises(ArgumentError, match="the arrays of write_pages do not fit"):
        write_pages(BYTES, QUERY[:, :2], QUERY[:, :2, :7], ONES, TABLE, cache_dtype="int4")
