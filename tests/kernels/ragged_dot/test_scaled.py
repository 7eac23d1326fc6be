"""Grouped products of numbers of 8 and 4 bits with scales."""

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
from tests.kernels.ragged_dot.test_kernel import BLOCKS, group_sizes
from tilekern.errors import ArgumentError, NotDifferentiableError
from tilekern.kernels.quantization import dequantize, quantize
from tilekern.kernels.ragged_dot import fused_ragged_dot, fused_reference, ragged_dot, scaled_reference
from tilekern.kernels.ragged_dot.cases import SCALED_CASES, ScaledCase
from tilekern.kernels.ragged_dot.kernel import ragged_dot_forward
from tilekern.kernels.ragged_dot.scaled import scaled_ragged_dot_forward
from tilekern.testing import assert_close, in_float64

# dtypes of lhs and rhs, and the blocks of their scales; None without scales
KINDS = {
    "int8_rows_columns": ("int8", "int8", (1, None), (None, 1)),
    "int8_blocks": ("int8", "int8", (1, 16), (16, 16)),
    "int8_nested_blocks": ("int8", "int8", (None, 32), (16, None)),
    "float8_blocks": ("float8_e4m3fn", "float8_e4m3fn", (1, 16), (16, 48)),
    "two_float8": ("float8_e5m2", "float8_e4m3fn", (1, None), (None, None)),
    "int8_float8": ("int8", "float8_e4m3fn", (1, None), (None, 1)),
    "int8_int4": ("int8", "int4", (1, None), (16, 1)),
    "bfloat16_int8": ("bfloat16", "int8", None, (None, 1)),
    "bfloat16_float8_blocks": ("bfloat16", "float8_e4m3fn", None, (16, 16)),
    "bfloat16_int4": ("bfloat16", "int4", None, (16, 1)),
    "bfloat16_float4": ("bfloat16", "float4_e2m1fn", None, (32, 1)),
    "bfloat16_short_blocks": ("bfloat16", "int8", None, (8, 1)),
    "float16_float8": ("float16", "float8_e5m2", None, (None, 1)),
    "float32_int8": ("float32", "int8", None, (32, 1)),
    "int8_bfloat16": ("int8", "bfloat16", (1, 16), None),
    "int8_without_scales": ("int8", "int8", None, None),
    "bfloat16_with_scales": ("bfloat16", "bfloat16", (1, 16), (None, 1)),
}
INNER, COLUMNS = 96, 48
SIZES = np.array([5, 0, 8, 3], np.int32)


def operand(x: Any, block: Any, dtype: str) -> tuple[Any, Any]:
    """Numbers of a dtype, and scales unless the block is None."""
    if block is None:
        return (jnp.round(3 * x) if dtype.startswith("int") else x).astype(dtype), None
    if dtype in ("bfloat16", "float32"):
        return x.astype(dtype), quantize(x, block)[1]
    return quantize(x, block, dtype=dtype)


def operands(kind: str, seed: int = 0, rows: int = 19) -> tuple[Any, Any, dict[str, Any]]:
    lhs_dtype, rhs_dtype, lhs_block, rhs_block = KINDS[kind]
    random = np.random.default_rng(seed)
    lhs, rhs = (jnp.asarray(random.standard_normal(s), jnp.float32) for s in ((rows, INNER), (4, INNER, COLUMNS)))
    (lhs, lhs_scale), (rhs, rhs_scale) = operand(lhs, lhs_block, lhs_dtype), operand(rhs, rhs_block, rhs_dtype)
    return lhs, rhs, {"lhs_scale": lhs_scale, "rhs_scale": rhs_scale}


def naive_dtype(*arrays: Any) -> Any:
    """The dtype of the naive computation: that of an operand of at least 16 bits, or float32."""
    return next((x.dtype for x in arrays if x.dtype.itemsize > 1), jnp.dtype(jnp.float32))


def check(lhs: Any, rhs: Any, sizes: Any, scales: Any, out_dtype: Any = None, **keywords: Any) -> None:
    out = ragged_dot(lhs, rhs, sizes, **scales, out_dtype=out_dtype, **keywords)
    static = {name: keywords[name] for name in ("transpose_rhs",) if name in keywords}
    every = lhs, rhs, sizes, *scales.values()
    low = jax.jit(partial(scaled_reference, dtype=naive_dtype(lhs, rhs), out_dtype=out.dtype, **static))(*every)
    assert_close(out, in_float64(scaled_reference, *every, dtype="float64", **static), low, length=lhs.shape[1])


@pytest.mark.sweep(4)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=2)
@given(data=st.data(), sizes=group_sizes(4, 9), seed=st.integers(0, 99))
def test_any_scales(kind: str, data: st.DataObject, sizes: np.ndarray, seed: int) -> None:
    lhs, rhs, scales = operands(kind, seed)
    out_dtype = data.draw(st.sampled_from([None, "float32", "bfloat16"]))
    # two numbers of 4 bits share a byte: tiles begin at even positions
    blocks = [b for b in BLOCKS if "4" not in rhs.dtype.name[:6] or not b.get("block_n", 0) % 2]
    check(lhs, rhs, sizes, scales, out_dtype, **data.draw(st.sampled_from(blocks)))


@pytest.mark.parametrize("kind", ["int8_rows_columns", "float8_blocks", "bfloat16_int4"])
def test_transposed_matrices(kind: str) -> None:
    lhs, rhs, scales = operands(kind)
    scales["rhs_scale"] = scales["rhs_scale"].mT
    check(lhs, rhs.mT, SIZES, scales, transpose_rhs=True)


@pytest.mark.parametrize("case", [case.small() for case in SCALED_CASES], ids=lambda case: case.name)
def test_small_scaled_cases(case: ScaledCase) -> None:
    lhs, rhs, sizes, scales = case.arrays(jax.random.key(0))
    check(lhs, rhs, sizes, {"lhs_scale": None} | scales)


@pytest.mark.one_backend
@pytest.mark.parametrize("case", SCALED_CASES, ids=lambda case: case.name)
def test_scaled_cases_trace(case: ScaledCase) -> None:
    lhs, rhs, sizes, scales = jax.eval_shape(case.arrays, jax.random.key(0))
    out = jax.eval_shape(ragged_dot, lhs, rhs, sizes, **scales)
    assert (out.shape, out.dtype) == ((case.case.rows, case.case.columns), jnp.bfloat16)


def test_products_of_integers_are_exact() -> None:
    """Sums in float32 would round: 127² · 4096 has 26 bits."""
    lhs, rhs = jnp.full((2, 4096), 127, jnp.int8).at[0, 0].set(126), jnp.full((1, 4096, 3), 127, jnp.int8)
    out = ragged_dot(lhs, rhs, jnp.array([2]), lhs_scale=jnp.full((2, 1), 2.0**-9), out_dtype="float32")
    exact = (np.asarray(lhs, np.int64) @ np.asarray(rhs[0], np.int64)).astype(np.float32) / 512
    np.testing.assert_array_equal(out, exact)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_matrices_of_8_bits_are_those_numbers_in_bfloat16(dtype: str) -> None:
    """Scales of columns are applied to the sums: no product is rounded."""
    lhs, rhs, scales = operands("bfloat16_int8")
    rhs = rhs.astype(dtype)
    wide = ragged_dot(lhs, rhs.astype(jnp.bfloat16), SIZES, out_dtype="float32")
    group = np.repeat(range(4), SIZES)
    expected = wide[: len(group)] * scales["rhs_scale"][group, 0]
    np.testing.assert_array_equal(ragged_dot(lhs, rhs, SIZES, **scales, out_dtype="float32")[: len(group)], expected)


def test_nan_stays_in_its_group_and_its_block() -> None:
    lhs, rhs, scales = operands("bfloat16_float8_blocks")
    rhs, scale = rhs.at[0, 3, 5].set(jnp.nan), scales["rhs_scale"].at[2, 1, 2].set(jnp.nan)
    odd = np.isnan(np.asarray(ragged_dot(lhs, rhs, SIZES, rhs_scale=scale), np.float32))
    expected = np.zeros_like(odd)
    expected[:5, 5] = expected[5:13, 32:] = True
    np.testing.assert_array_equal(odd, expected)
    assert (ragged_dot(lhs, rhs, SIZES, rhs_scale=scale)[16:] == 0).all()


def test_under_vmap() -> None:
    lhs, rhs, scales = operands("int8_blocks")
    twice = jnp.stack([lhs, -lhs]), jnp.stack([scales["lhs_scale"], 2 * scales["lhs_scale"]])
    call = lambda lhs, scale: ragged_dot(lhs, rhs, SIZES, lhs_scale=scale, rhs_scale=scales["rhs_scale"])  # noqa: E731
    first, second = jax.vmap(call)(*twice)
    np.testing.assert_array_equal(first, call(lhs, scales["lhs_scale"]))
    np.testing.assert_array_equal(second, -2 * first)


# --- derivatives ------------------------------------------------------------------------------------------------------

FLOATS = {  # which arguments of (lhs, rhs, lhs_scale, rhs_scale) have derivatives
    "int8_rows_columns": (2, 3),
    "int8_blocks": (2, 3),
    "bfloat16_int8": (0, 3),
    "bfloat16_float8_blocks": (0, 3),
    "bfloat16_int4": (0, 3),
    "float32_int8": (0, 3),
    "int8_bfloat16": (1, 2),
    "bfloat16_with_scales": (0, 1, 2, 3),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", FLOATS)
def test_gradients(kind: str, transposed: bool) -> None:
    lhs, rhs, scales = operands(kind)
    cotangent = np.random.default_rng(1).standard_normal((19, COLUMNS)).astype(np.float32)
    of_rhs = scales["rhs_scale"]
    if transposed:
        rhs, of_rhs = rhs.mT, None if of_rhs is None else of_rhs.mT
    every = lhs, rhs, scales["lhs_scale"], of_rhs

    def ours(*every: Any) -> Any:
        lhs, rhs, *scales = every
        out = ragged_dot(lhs, rhs, SIZES, lhs_scale=scales[0], rhs_scale=scales[1], transpose_rhs=transposed)
        return (out.astype(jnp.float32) * cotangent).sum()

    def theirs(*every: Any, dtype: Any) -> Any:
        lhs, rhs, *scales = every
        out = scaled_reference(lhs, rhs, SIZES, *scales, dtype=dtype, transpose_rhs=transposed)
        return (out * cotangent).sum()

    found = jax.grad(ours, FLOATS[kind])(*every)
    low = jax.grad(partial(theirs, dtype=jnp.bfloat16), FLOATS[kind])(*every)
    high = in_float64(jax.grad(partial(theirs, dtype="float64"), FLOATS[kind]), *every)
    for one, naive, exact in zip(found, low, high, strict=True):
        assert_close(one, exact, naive, length=19 * COLUMNS, factor=3)


@pytest.mark.one_backend
@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", ["float32_int8", "bfloat16_with_scales"])
def test_derivatives_along_all_operands_agree(kind: str) -> None:
    """Forward over reverse and reverse over reverse, by operands and scales at once, against the definition."""
    lhs, rhs, scales = operands(kind)
    given = {0: lhs.astype(jnp.float32), 3: scales["rhs_scale"]}
    if kind == "bfloat16_with_scales":
        rhs = rhs.astype(jnp.float32)
        given |= {1: rhs, 2: scales["lhs_scale"]}
    rest = {1: rhs, 2: scales["lhs_scale"]}

    def energy(function: Any, moving: Any) -> Any:
        every = rest | moving
        return (function(*(every[n] for n in range(4))) ** 2).sum()

    def ours(lhs: Any, rhs: Any, lhs_scale: Any, rhs_scale: Any) -> Any:
        return ragged_dot(lhs, rhs, SIZES, lhs_scale=lhs_scale, rhs_scale=rhs_scale)

    def theirs(lhs: Any, rhs: Any, *scales: Any) -> Any:
        return scaled_reference(lhs, rhs, SIZES, *scales, dtype=scales[1].dtype)

    def products(function: Any, moving: Any) -> Any:
        slope = jax.grad(partial(energy, function))
        forward = jax.jvp(slope, (moving,), (moving,))[1]

        def along(at: Any) -> Any:
            return sum(jax.tree.leaves(jax.tree.map(lambda a, b: (a * b).sum(), slope(at), moving)))

        return forward, jax.grad(along)(moving)

    found, low = products(ours, given), products(theirs, given)
    high = in_float64(lambda *leaves: products(theirs, dict(zip(given, leaves, strict=True))), *given.values())
    for one, naive, exact in zip(*map(jax.tree.leaves, (found, low, high)), strict=True):
        assert_close(one, exact, naive, length=19 * COLUMNS * INNER, factor=3)


@pytest.mark.one_backend
def test_numbers_of_8_bits_have_no_derivative() -> None:
    lhs, rhs, scales = operands("bfloat16_float8_blocks")
    with pytest.raises(NotDifferentiableError, match=re.escape("rhs of float8_e4m3fn has no derivative")):
        jax.grad(lambda rhs: ragged_dot(lhs, rhs, SIZES, **scales).sum().astype(jnp.float32))(rhs)


# --- with an epilogue -------------------------------------------------------------------------------------------------


def gated(gate: Any, up: Any, bias: Any) -> Any:
    return jax.nn.silu(gate) * up + bias


@pytest.mark.parametrize("kind", ["int8_blocks", "bfloat16_int8", "bfloat16_float4"])
def test_epilogues(kind: str) -> None:
    lhs, gate, scales = operands(kind)
    _, up, others = operands(kind, seed=1)
    both = scales["rhs_scale"], others["rhs_scale"]
    bias = jnp.linspace(-1, 1, 4 * COLUMNS).reshape(4, 1, COLUMNS)

    def ours(lhs_scale: Any, both: Any, bias: Any) -> Any:
        options: Any = {"lhs_scale": lhs_scale, "rhs_scale": both, "out_dtype": "float32"}
        return fused_ragged_dot(lhs, (gate, up), SIZES, bias, epilogue=gated, **options)

    def theirs(lhs_scale: Any, gate_scale: Any, up_scale: Any, bias: Any) -> Any:
        wide = bias.dtype
        rows = lhs.astype(wide) if lhs_scale is None else dequantize(lhs, lhs_scale, wide)
        matrices = dequantize(gate, gate_scale, wide), dequantize(up, up_scale, wide)
        return fused_reference(rows, matrices, SIZES, bias, epilogue=gated)

    given = scales["lhs_scale"], *both, bias
    out = ours(given[0], both, bias)
    assert_close(out, in_float64(theirs, *given), jax.jit(theirs)(*given), length=4 * INNER)

    def of_scales(function: Any) -> Any:
        return jax.grad(lambda of_gate: function(of_gate).sum())

    found = of_scales(lambda of_gate: ours(given[0], (of_gate, both[1]), bias))(both[0])
    slope = lambda of_gate, *rest: of_scales(lambda s: theirs(rest[0], s, *rest[1:]))(of_gate)  # noqa: E731
    others = both[0], given[0], both[1], bias
    assert_close(found, in_float64(slope, *others), jax.jit(slope)(*others), length=19 * COLUMNS, factor=3)


# --- compiled, interpreted, refused -----------------------------------------------------------------------------------


@pytest.mark.one_backend
def test_the_interpreter_agrees() -> None:
    lhs, rhs, scales = operands("int8_blocks")
    ends, of_rhs = np.cumsum(SIZES, dtype=np.int32), jnp.repeat(scales["rhs_scale"], 16, 2)
    given = lhs, rhs, ends, scales["lhs_scale"], of_rhs
    traced = scaled_ragged_dot_forward.trace(*given, out_dtype="float32", block_m=8, block_n=16, block_k=32)
    every = lhs, rhs, SIZES, *scales.values()
    oracle = in_float64(scaled_reference, *every, dtype="float64")
    assert_close(tk.interpret(traced)(*given), oracle, jax.jit(scaled_reference)(*every), length=INNER)


@pytest.mark.parametrize("kind", ["int8_rows_columns", "bfloat16_int8"])
def test_programs_that_own_groups(kind: str) -> None:
    lhs, rhs, scales = operands(kind)
    every = lhs, rhs, SIZES, *scales.values()
    ends, of_lhs = np.cumsum(SIZES, dtype=np.int32), scales["lhs_scale"]
    out = scaled_ragged_dot_forward(
        lhs, rhs, ends, of_lhs, scales["rhs_scale"], out_dtype="float32", block_m=8, block_n=16, owned="groups"
    )
    low = jax.jit(partial(scaled_reference, dtype=naive_dtype(lhs, rhs), out_dtype=out.dtype))(*every)
    assert_close(out, in_float64(scaled_reference, *every, dtype="float64"), low, length=INNER)


LHS, RHS = jnp.zeros((20, 32), jnp.int8), jnp.zeros((4, 32, 64), jnp.int8)
ONE = jnp.ones((1, 1))


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("lhs", "rhs", "keywords", "got"),
    [
        (LHS, RHS, {"lhs_scale": jnp.ones(20)}, "lhs_scale = float32[20]"),
        (LHS, RHS, {"lhs_scale": jnp.ones((20, 3))}, "lhs_scale = float32[20, 3]"),
        (LHS, RHS, {"lhs_scale": jnp.ones((20, 1), jnp.int32)}, "lhs_scale = int32[20, 1]"),
        (LHS, RHS, {"lhs_scale": 2.0}, "lhs_scale = 2.0"),
        (LHS, RHS, {"rhs_scale": jnp.ones((4, 64))}, "rhs_scale = float32[4, 64]"),
        (LHS, RHS, {"rhs_scale": jnp.ones((4, 64, 1))}, "rhs_scale = float32[4, 64, 1]"),
        (LHS, RHS, {"rhs_scale": jnp.ones((4, 0, 64))}, "rhs_scale = float32[4, 0, 64]"),
        (LHS, RHS, {"out_dtype": "int32"}, "out_dtype = 'int32'"),
        (LHS, RHS, {"out_dtype": "wide"}, "out_dtype = 'wide'"),
        (LHS, RHS.astype(jnp.int32), {}, "rhs = int32[4, 32, 64]"),
        (LHS.astype(jnp.uint8), RHS, {}, "lhs = uint8[20, 32]"),
        (LHS.astype(jnp.float32), RHS.astype(jnp.bfloat16), {}, "rhs = bfloat16[4, 32, 64]"),
        (LHS[:, :30], RHS, {"lhs_scale": ONE}, "lhs = int8[20, 30]"),
    ],
)
def test_arguments_that_do_not_fit(lhs: Any, rhs: Any, keywords: Any, got: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(got)) as caught:
        ragged_dot(lhs, rhs, SIZES, **keywords)  # here
    assert "# here" in caught.value.loc.snippet()


@pytest.mark.one_backend
def test_blocks_that_do_not_nest() -> None:
    lhs, rhs = jnp.zeros((3, 96), jnp.int8), jnp.zeros((4, 96, 5), jnp.int8)
    with pytest.raises(ArgumentError, match="blocks of 32 and of 48 numbers"):
        ragged_dot(lhs, rhs, SIZES, lhs_scale=jnp.ones((3, 2)), rhs_scale=jnp.ones((4, 3, 1)))


@pytest.mark.one_backend
def test_scales_of_several_matrices() -> None:
    both, scale = (RHS, RHS), jnp.ones((4, 1, 64))
    for wrong in (scale, (scale,), (scale, None), (scale, scale[:, :, :1])):
        with pytest.raises(ArgumentError, match=r"matrices of fused_ragged_dot do not fit|rhs_scale"):
            fused_ragged_dot(LHS, both, SIZES, epilogue=lambda a, b: a * b, rhs_scale=wrong)


@pytest.mark.one_backend
def test_operands_without_scales_run_the_kernel_without_scales() -> None:
    program = str(jax.make_jaxpr(ragged_dot)(LHS.astype(jnp.float32), RHS.astype(jnp.float32), SIZES))
    assert ragged_dot_forward.__name__ in program and "scaled" not in program


@pytest.mark.one_backend
@pytest.mark.parametrize("target", ["cpu:llvm", "cpu:xla", "cuda:sm_90", "tpu:v5e", "tpu:v6e"])
@pytest.mark.parametrize("dtypes", [("bfloat16", "int4"), ("int4", "int8"), ("int4", "int4")])
@pytest.mark.parametrize(("inner", "columns"), [(33, 40), (257, 129), (64, 33)])
def test_blocks_of_numbers_of_4_bits_are_whole_bytes(
    inner: int, columns: int, dtypes: tuple[str, str], target: str
) -> None:
    """The schedules of odd sizes, of which some take the whole dim as a block."""
    for transposed in (False, True):
        matrix = (columns, inner) if transposed else (inner, columns)
        lhs, rhs = jax.ShapeDtypeStruct((40, inner), dtypes[0]), jax.ShapeDtypeStruct((3, *matrix), dtypes[1])
        ends, scale = jax.ShapeDtypeStruct((3,), jnp.int32), jax.ShapeDtypeStruct((3, 1, columns), jnp.float32)
        static = {"transpose_rhs": transposed, "out_dtype": "bfloat16"}
        scaled_ragged_dot_forward.trace(lhs, rhs, ends, None, scale, **static).lower(target)
