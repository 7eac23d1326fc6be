"""Derivatives of the kernels other than attention: of both modes, of second order, under JAX's transformations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tilekern.kernels
from tests.kernels.programs import arrays_of, calls, equations
from tilekern.kernels import group_norm, layer_norm, matmul, rms_norm, rope, softmax, swiglu
from tilekern.kernels.group_norm import reference as group_norm_reference
from tilekern.kernels.layer_norm import reference as layer_norm_reference
from tilekern.kernels.matmul import fused_matmul, fused_reference
from tilekern.kernels.matmul import reference as matmul_reference
from tilekern.kernels.norms import norm_backward
from tilekern.kernels.ragged_dot import contracting_reference
from tilekern.kernels.ragged_dot import reference as ragged_dot_reference
from tilekern.kernels.rms_norm import add_reference, add_rms_norm
from tilekern.kernels.rms_norm import reference as rms_norm_reference
from tilekern.kernels.rope import normed_reference, rms_norm_rope
from tilekern.kernels.rope import reference as rope_reference
from tilekern.kernels.softmax import reference as softmax_reference
from tilekern.kernels.swiglu import reference as swiglu_reference
from tilekern.testing import assert_close, in_float64

ROWS, COLUMNS = 21, 50
# Small programs, whose time is that of XLA's compiler.
QUICK = {"xla_backend_optimization_level": 0}
MATRIX, VECTOR = (ROWS, COLUMNS), (COLUMNS,)
IMAGES, CHANNELS = (2, 5, 4, 12), (12,)


@dataclass(frozen=True)
class Differentiated:
    """A kernel's function of the arrays that it is differentiated in, and its definition.

    Attributes:
      function: of the arrays, and of `keywords`.
      reference: the same; takes `dtype`, too.
      shapes: of the arrays.
      keywords: of both.
    """

    function: Callable[..., jax.Array]
    reference: Callable[..., jax.Array]
    shapes: tuple[tuple[int, ...], ...]
    keywords: dict[str, Any] = field(default_factory=dict)

    def arrays(self, dtype: Any, *, leading: int = 0) -> list[Any]:
        """Standard normal ones, of which the first may have one more dim in front; and a cotangent of the result."""
        random = np.random.default_rng(0)
        out = jax.eval_shape(self.theirs, *(jax.ShapeDtypeStruct(s, dtype) for s in self.shapes))
        shapes = [*self.shapes, out.shape]
        stacked = {0, len(shapes) - 1} if leading else set()
        return [
            jnp.asarray(random.standard_normal((leading, *s) if n in stacked else s), dtype)
            for n, s in enumerate(shapes)
        ]

    @property
    def ours(self) -> Callable[..., jax.Array]:
        """The function of its arrays alone."""
        return partial(self.function, **self.keywords)

    @property
    def theirs(self) -> Callable[..., jax.Array]:
        """The definition of its arrays alone."""
        return partial(self.reference, **self.keywords)


def turned(x: Any, frequencies: Any, *, rotate: Callable[..., Any], **keywords: Any) -> Any:
    """Rope at positions that are not its default, differentiated in frequencies, too."""
    return rotate(x, np.arange(7) + 3, frequencies=frequencies, **keywords)


def product(x: Any, w: Any, *, dtype: Any = None, transpose_lhs: bool = False, transpose_rhs: bool = False) -> Any:
    """The definition of matmul with transposed operands; in any `dtype` it accumulates as matmul does."""
    del dtype
    return matmul_reference(x.mT if transpose_lhs else x, w.mT if transpose_rhs else w)


def grouped(lhs: Any, rhs: Any, *, of: Callable[..., Any], **keywords: Any) -> Any:
    """A product of groups of rows, one of them empty, with rows that no group has; its definition accumulates as it."""
    keywords.pop("dtype", None)
    return of(lhs, rhs, np.array([5, 0, 3, 1], np.int32), **keywords)


def differentiated_groups(name: str, *shapes: tuple[int, ...], **keywords: Any) -> Differentiated:
    """A function of `ragged_dot` and its definition."""
    definition = ragged_dot_reference if name == "ragged_dot" else contracting_reference
    ours, theirs = (partial(grouped, of=f) for f in (getattr(tilekern.kernels, name), definition))
    return Differentiated(ours, theirs, shapes, keywords)


def added(*arrays: Any, of: Callable[..., Any], **keywords: Any) -> Any:
    """Both results of `add_rms_norm`, or of its definition."""
    return jnp.stack(of(*arrays, **keywords))


def gated(product: Any, bias: Any, gate: Any) -> Any:
    """An epilogue."""
    return jax.nn.silu(product + bias) * gate


LEFT, RIGHT = ((13, 21), (21, 21))
KERNELS = {
    "rms_norm": Differentiated(rms_norm, rms_norm_reference, (MATRIX, VECTOR), {"offset": 1.0, "eps": 0.1}),
    "rms_norm_plain": Differentiated(rms_norm, rms_norm_reference, (MATRIX,)),
    "add_rms_norm": Differentiated(
        partial(added, of=add_rms_norm), partial(added, of=add_reference), (MATRIX, MATRIX, VECTOR)
    ),
    "layer_norm": Differentiated(layer_norm, layer_norm_reference, (MATRIX, VECTOR, VECTOR)),
    "layer_norm_plain": Differentiated(layer_norm, layer_norm_reference, (MATRIX,), {"eps": 0.1}),
    "group_norm": Differentiated(
        group_norm,
        group_norm_reference,
        (IMAGES, CHANNELS, CHANNELS),
        {"num_groups": 3, "activation": "silu"},
    ),
    "group_norm_plain": Differentiated(group_norm, group_norm_reference, (IMAGES,), {"group_size": 1, "eps": 0.1}),
    "softmax": Differentiated(softmax, softmax_reference, (MATRIX,)),
    "softmax_axis": Differentiated(softmax, softmax_reference, ((3, 5, 7),), {"axis": 1}),
    "swiglu": Differentiated(swiglu, swiglu_reference, (MATRIX, MATRIX)),
    "geglu": Differentiated(swiglu, swiglu_reference, (MATRIX, MATRIX), {"activation": "gelu"}),
    "geglu_tanh": Differentiated(swiglu, swiglu_reference, (MATRIX, MATRIX), {"activation": "gelu_tanh"}),
    "reglu": Differentiated(swiglu, swiglu_reference, (MATRIX, MATRIX), {"activation": "relu"}),
    "matmul": Differentiated(matmul, product, (LEFT, RIGHT)),
    "matmul_tn": Differentiated(matmul, product, (LEFT[::-1], RIGHT), {"transpose_lhs": True}),
    "matmul_nt": Differentiated(matmul, product, (LEFT, RIGHT[::-1]), {"transpose_rhs": True}),
    "matmul_tt": Differentiated(
        matmul, product, (LEFT[::-1], RIGHT[::-1]), {"transpose_lhs": True, "transpose_rhs": True}
    ),
    "fused_matmul": Differentiated(fused_matmul, fused_reference, (LEFT, RIGHT, RIGHT[1:], LEFT), {"epilogue": gated}),
    "matmul_batches": Differentiated(matmul, product, ((2, 1, 5, 6), (3, 6, 4))),
    "fused_matmul_batches": Differentiated(
        fused_matmul, fused_reference, ((2, 1, 5, 6), (3, 6, 4), (4,), (3, 1, 1)), {"epilogue": gated}
    ),
    "ragged_dot": differentiated_groups("ragged_dot", (11, 6), (4, 6, 6)),
    "ragged_dot_nt": differentiated_groups("ragged_dot", (11, 6), (4, 9, 6), transpose_rhs=True),
    "ragged_contracting_dot": differentiated_groups("ragged_contracting_dot", (11, 6), (11, 9)),
    "rms_norm_rope": Differentiated(
        rms_norm_rope, normed_reference, ((2, 7, 3, 10), (10,)), {"offset": 1.0, "eps": 0.1}
    ),
    "rope": Differentiated(partial(turned, rotate=rope), partial(turned, rotate=rope_reference), ((2, 7, 3, 10), (5,))),
    "rope_interleaved": Differentiated(rope, rope_reference, ((7, 3, 10),), {"interleaved": True, "theta": 50.0}),
}
ROW_KERNELS = ("rms_norm", "layer_norm", "softmax", "swiglu")
every_kernel = pytest.mark.parametrize("name", KERNELS)
some_kernels = pytest.mark.parametrize("name", [*ROW_KERNELS, "group_norm", "matmul", "ragged_dot", "rope"])


def pulled(function: Callable[..., Any], *arrays: Any) -> Any:
    """The cotangents of all arrays but the last, which is that of the result."""
    return jax.vjp(function, *arrays[:-1])[1](arrays[-1])


def pushed(function: Callable[..., Any], *arrays: Any) -> Any:
    """The tangent of the result, along the cosines of the arrays."""
    return jax.jvp(function, arrays[:-1], tuple(jnp.cos(x) for x in arrays[:-1]))[1:]


def both_modes(function: Callable[..., Any], *arrays: Any) -> Any:
    return *pulled(function, *arrays), *pushed(function, *arrays)


@cache
def expected(name: str, dtype: str, derivative: Callable[..., Any]) -> tuple[Any, Any]:
    """The oracle, and the naive computation."""
    kernel = KERNELS[name]
    naive = jax.jit(partial(derivative, partial(kernel.theirs, dtype=dtype)), compiler_options=QUICK)
    arrays = kernel.arrays(dtype)
    return in_float64(partial(derivative, kernel.theirs), *arrays), jax.tree.map(np.asarray, naive(*arrays))


def check(name: str, dtype: str, derivative: Callable[..., Any] = both_modes, **blocks: int) -> None:
    kernel = KERNELS[name]
    arrays = kernel.arrays(dtype)
    found = jax.jit(partial(derivative, partial(kernel.ours, **blocks)), compiler_options=QUICK)(*arrays)
    for f, oracle, low in zip(found, *expected(name, dtype, derivative), strict=True):
        assert_close(f, oracle, low, length=arrays[0].size, factor=3)


@every_kernel
def test_both_modes(name: str, backend: str) -> None:
    """In bfloat16 where programs are interpreted, and in float32."""
    interpreted = backend in ("triton", "mosaic")
    check(name, "bfloat16" if interpreted else "float32", pulled if interpreted else both_modes)


@pytest.mark.sweep(2)
@pytest.mark.one_backend
@some_kernels
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_narrow_dtypes(name: str, dtype: str) -> None:
    check(name, dtype)


def check_norm(columns: int, tiles: int, centered: bool) -> None:
    """Compare the gradient of a norm in these blocks; eps is 0, which rows beyond the last must not see."""
    x, weight, cotangent = KERNELS["rms_norm"].arrays("float32")
    x = 4 + x if centered else x
    backward = partial(
        norm_backward, eps=0.0, offset=0.0, centered=centered, needs=(True, True, centered),
        block_rows=4, block_columns=columns, tiles=tiles,
    )  # fmt: skip
    found = [f for f in jax.jit(backward, compiler_options=QUICK)(x, weight, cotangent) if f is not None]
    others = (weight, jnp.zeros_like(weight)) if centered else (weight,)
    naive = partial(layer_norm_reference if centered else rms_norm_reference, eps=0.0)
    oracle = in_float64(partial(pulled, naive), x, *others, cotangent)
    low = jax.jit(partial(pulled, naive), compiler_options=QUICK)(x, *others, cotangent)
    for f, o, n in zip(found, oracle, low, strict=True):
        assert_close(f, o, n, length=x.size, factor=3)


@pytest.mark.parametrize("centered", [False, True])
def test_programs_of_several_tiles_of_the_norms(centered: bool) -> None:
    check_norm(64, 3, centered)


@pytest.mark.parametrize("columns", [7, pytest.param(16, marks=pytest.mark.slow)])
def test_long_rows_of_a_norm(columns: int) -> None:
    check_norm(columns, 1, centered=False)


@pytest.mark.parametrize("columns", [7, pytest.param(16, marks=pytest.mark.slow)])
def test_long_rows_of_a_centred_norm(columns: int) -> None:
    """Their blocks merge by deviations from means that differ, which every sample must see."""
    check_norm(columns, 1, centered=True)


@pytest.mark.parametrize("columns", [64, 7])
def test_blocks_of_softmax(columns: int) -> None:
    check("softmax", "float32", pulled, block_rows=4, block_columns=columns)


# --- second order ----------------------------------------------------------------------------------------------------


@pytest.fixture
def double() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def second_order(function: Callable[..., Any], *arrays: Any) -> list[Any]:
    """Second derivatives of a number along the cosines of the arrays, in all four orders of modes."""
    moved = tuple(jnp.cos(x) for x in arrays)

    def loss(*arrays: Any) -> jax.Array:
        return jnp.sum(jnp.sin(function(*arrays)))

    def along(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arrays: jax.jvp(function, arrays, moved)[1]

    numbers = tuple(range(len(arrays)))
    gradient = jax.grad(loss, numbers)
    weighted = jax.grad(lambda *a: sum(jnp.vdot(g, m) for g, m in zip(gradient(*a), moved, strict=True)), numbers)
    return [
        along(gradient)(*arrays),
        weighted(*arrays),
        jax.grad(along(loss), numbers)(*arrays),
        along(along(loss))(*arrays),
    ]


@pytest.mark.sweep(2)
@pytest.mark.one_backend
@pytest.mark.usefixtures("double")
@every_kernel
def test_second_order(name: str) -> None:
    kernel = KERNELS[name]
    arrays = kernel.arrays(jnp.float64)[:-1]
    results = (jax.jit(partial(second_order, f), compiler_options=QUICK)(*arrays) for f in (kernel.ours, kernel.theirs))
    for found, wanted in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-11)


# --- under transformations -------------------------------------------------------------------------------------------


@pytest.mark.one_backend
@some_kernels
def test_vmap_agrees_with_a_loop(name: str) -> None:
    """Over the first array and the cotangent; what all share gets the sum."""
    kernel = KERNELS[name]
    first, *shared, cotangent = kernel.arrays(jnp.float32, leading=3)

    def gradient(first: Any, cotangent: Any, *shared: Any) -> Any:
        return pulled(kernel.ours, first, *shared, cotangent)

    mapped = jax.jit(jax.vmap(gradient, (0, 0, *[None] * len(shared))), compiler_options=QUICK)(
        first, cotangent, *shared
    )
    one = jax.jit(gradient, compiler_options=QUICK)
    each = [one(first[n], cotangent[n], *shared) for n in range(3)]
    tolerance = 1e3 * np.finfo(np.float32).eps
    for found, expected in zip(mapped, zip(*each, strict=True), strict=True):
        np.testing.assert_allclose(found, jnp.stack(expected), rtol=tolerance, atol=tolerance)

    def summed(*shared: Any) -> jax.Array:
        return jnp.vdot(jax.vmap(kernel.ours, (0, *[None] * len(shared)))(first, *shared), cotangent)

    found = jax.jit(jax.grad(summed, tuple(range(len(shared)))), compiler_options=QUICK)(*shared) if shared else ()
    for f, expected in zip(found, list(zip(*each, strict=True))[1:], strict=True):
        np.testing.assert_allclose(f, sum(expected), rtol=tolerance, atol=tolerance)


@pytest.mark.one_backend
@some_kernels
def test_scans_and_checkpoints_agree_with_a_loop(name: str) -> None:
    kernel = KERNELS[name]
    *arrays, cotangent = kernel.arrays(jnp.float32)

    def looped(loop: bool, step: Callable[..., Any], first: Any, *others: Any) -> jax.Array:
        def body(x: Any, _: Any) -> tuple[Any, None]:
            return jnp.sin(step(x, *others)), None

        if loop:
            return jnp.vdot(lax.scan(body, first, length=3)[0], cotangent)
        for _ in range(3):
            first, _ = body(first, None)
        return jnp.vdot(first, cotangent)

    numbers = tuple(range(len(arrays)))
    plain = jax.jit(jax.grad(partial(looped, False, kernel.ours), numbers), compiler_options=QUICK)(*arrays)
    scanned = jax.jit(jax.grad(partial(looped, True, jax.checkpoint(kernel.ours)), numbers), compiler_options=QUICK)(
        *arrays
    )
    tolerance = 1e3 * np.finfo(np.float32).eps
    for found, expected in zip(scanned, plain, strict=True):
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.one_backend
@pytest.mark.parametrize(("names", "forwards"), [((), 2), (("softmax_out",), 1)])
def test_checkpoints_may_save_the_softmax(names: tuple[str, ...], forwards: int) -> None:
    policy = jax.checkpoint_policies.save_only_these_names(*names)

    def layer(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(softmax(jnp.sin(x))))

    saving = jax.grad(jax.checkpoint(layer, policy=policy))
    assert calls(jax.make_jaxpr(saving)(jnp.ones(MATRIX)).jaxpr, "softmax_forward") == forwards


# --- what it costs ---------------------------------------------------------------------------------------------------


@pytest.mark.one_backend
@pytest.mark.parametrize("name", ROW_KERNELS)
def test_reverse_mode_has_no_wide_copy_of_narrow_arrays(name: str) -> None:
    kernel = KERNELS[name]
    arrays = kernel.arrays(jnp.bfloat16)
    made = list(arrays_of(jax.make_jaxpr(partial(pulled, kernel.ours))(*arrays).jaxpr))
    assert made and all(x.dtype == jnp.bfloat16 for x in made if x.size >= ROWS * COLUMNS)


@pytest.mark.one_backend
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm", "swiglu"])
def test_only_what_is_wanted_is_computed(name: str) -> None:
    kernel = KERNELS[name]
    first, *others, cotangent = kernel.arrays(jnp.float32)
    program = jax.make_jaxpr(lambda first, ct: pulled(lambda x: kernel.ours(x, *others), first, ct))(first, cotangent)
    (backward,) = (e for e in equations(program.jaxpr) if str(e.params.get("callee")) == f"{name}_backward")
    assert [v.aval.shape for v in backward.outvars] == [first.shape]


@pytest.mark.one_backend
@pytest.mark.parametrize("target", ["cpu:xla", "cpu:llvm"])
def test_gradients_are_the_same_bits_each_time(target: str) -> None:
    if target == "cpu:llvm":
        pytest.importorskip("llvmlite", reason="needs llvmlite")
    random = np.random.default_rng(0)
    x, weight, bias, cotangent = (
        random.standard_normal(s, np.float32) for s in ((999, 130), (130,), (130,), (999, 130))
    )
    run = jax.jit(partial(pulled, partial(layer_norm, target=target)))
    first = run(x, weight, bias, cotangent)
    for _ in range(5):
        for a, b in zip(first, run(x, weight, bias, cotangent), strict=True):
            np.testing.assert_array_equal(a, b)
