"""Products of groups of rows, beside XLA's `ragged_dot`, JAX's megablox and, where it is installed, tokamax.

Group sizes come from a random router. They are constants of the programs, so that the simulation knows them.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from bench.tpu_static.cases.case import Case
from bench.tpu_static.cases.measured import Arguments, Measured, with_gradient
from tilekern.kernels.quantization import dequantize
from tilekern.kernels.ragged_dot import api, ragged_contracting_dot, ragged_dot
from tilekern.kernels.ragged_dot.cases import CASES as SHAPES
from tilekern.kernels.ragged_dot.cases import SCALED_CASES, ScaledCase
from tilekern.kernels.ragged_dot.cases import Case as Shape

Tiling = tuple[int, int, int]
"""Rows, inner dim, columns."""

# megablox' default of 128³ is left out: it takes 5 to 10 times as long. On v5e 512 rows take 1.1 to 1.2 times the time
# of 256, and tokamax' kernels differ from megablox' by less than 1 %: one setting stands for all settings where three
# products have to be compiled.
TILINGS: tuple[Tiling, ...] = ((256, 1024, 1024), (512, 1024, 1024), (256, 2048, 1024))

_MEGABLOX = "jax.experimental.pallas.ops.tpu.megablox.gmm"
_TOKAMAX = "tokamax._src.ops.ragged_dot.pallas_mosaic_tpu_kernel"


def _sizes(shape: Shape) -> np.ndarray[Any, np.dtype[np.int32]]:
    experts = np.random.default_rng(0).integers(0, shape.groups, shape.rows)
    return np.bincount(experts, minlength=shape.groups).astype(np.int32)


def _flops(shape: Shape) -> int:
    return 2 * shape.rows * shape.inner * shape.columns


def _evaluated(module: Any, name: str) -> Any:
    """A context in which a function of group sizes is evaluated while traced, so that its results are constants."""
    function = getattr(module, name)

    def evaluated(*arguments: Any, **keywords: Any) -> Any:
        with jax.ensure_compile_time_eval():
            return function(*arguments, **keywords)

    return mock.patch.object(module, name, evaluated)


def _with_known_ends(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of ours, whose ends of groups are constants."""

    def with_constants(*arguments: Any, **keywords: Any) -> Any:
        with _evaluated(api, "ends_of"):
            return function(*arguments, **keywords)

    return with_constants


# --- products ---------------------------------------------------------------------------------------------------------


def _product(shape: Shape) -> tuple[Measured, Measured]:
    def arguments() -> Arguments:
        lhs = jax.ShapeDtypeStruct((shape.rows, shape.inner), jnp.bfloat16)
        return lhs, jax.ShapeDtypeStruct((shape.groups, shape.inner, shape.columns), jnp.bfloat16), _sizes(shape)

    formulas = {"xla": jax.lax.ragged_dot} | _kernels(shape, TILINGS, lambda kernels: kernels.product)
    case = Measured(f"ragged_dot {shape.name}", _with_known_ends(ragged_dot), arguments, formulas, _flops(shape))
    _, trained = with_gradient(case, (0, 1))
    of_megablox = f"megablox {_name(TILINGS[0])}", _differentiable(_Kernels(_MEGABLOX, TILINGS[0]))
    return case, replace(trained, formulas={"xla": jax.lax.ragged_dot} | dict([of_megablox]))


def _contracting(shape: Shape) -> Measured:
    def arguments() -> Arguments:
        lhs, rhs = (jax.ShapeDtypeStruct((shape.rows, n), jnp.bfloat16) for n in (shape.inner, shape.columns))
        return lhs, rhs, _sizes(shape)

    formulas = {"xla": _contracting_by_xla} | _kernels(shape, TILINGS[:2], lambda kernels: kernels.contracting)
    function = _with_known_ends(ragged_contracting_dot)
    return Measured(f"ragged_contracting_dot {shape.name}", function, arguments, formulas, _flops(shape))


def _contracting_by_xla(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
    numbers = jax.lax.RaggedDotDimensionNumbers(
        (((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    return jax.lax.ragged_dot_general(lhs, rhs, sizes, numbers)


# --- products with scales ---------------------------------------------------------------------------------------------


def _scaled(case: ScaledCase, kind: str) -> Measured:
    shape, rates = case.case, case.lhs_dtype or "bfloat16"

    def arguments() -> Arguments:
        lhs, rhs, _, scales = jax.eval_shape(lambda: case.arrays(jax.random.key(0)))
        return lhs, rhs, _sizes(shape), *scales.values()

    names = ("rhs_scale",) if case.lhs_dtype is None else ("lhs_scale", "rhs_scale")

    def ours(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, *scales: jax.Array, target: str) -> jax.Array:
        function = _with_known_ends(ragged_dot)
        return function(lhs, rhs, sizes, **dict(zip(names, scales, strict=True)), target=target)

    def dequantised(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, *scales: jax.Array) -> jax.Array:
        rows = lhs if len(scales) == 1 else dequantize(lhs, scales[0], jnp.bfloat16)
        return jax.lax.ragged_dot(rows, dequantize(rhs, scales[-1], jnp.bfloat16), sizes)

    return Measured(f"ragged_dot {shape.name} {kind}", ours, arguments, {"xla": dequantised}, _flops(shape), rates)


# --- kernels of others ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kernels:
    """The grouped products of megablox, or of tokamax, whose kernels are derived from megablox'.

    Attributes:
      module: the module of the functions.
      tiling: the tiling of all products.
      first: arguments of tokamax' functions before the dtype of the result.
    """

    module: str
    tiling: Tiling
    first: tuple[Any, ...] = ()

    def product(self, lhs: jax.Array, rhs: jax.Array, sizes: Any, *, transpose_rhs: bool = False) -> jax.Array:
        """`ragged_dot`."""
        return self._call("gmm", lhs, rhs, sizes, transpose_rhs=transpose_rhs)

    def contracting(self, lhs: jax.Array, rhs: jax.Array, sizes: Any) -> jax.Array:
        """`ragged_contracting_dot`; the kernel takes lhs transposed."""
        return self._call("tgmm", lhs.swapaxes(0, 1), rhs, sizes)

    def _call(self, name: str, lhs: jax.Array, rhs: jax.Array, sizes: Any, **keywords: Any) -> jax.Array:
        module = importlib.import_module(self.module)
        function = inspect.unwrap(getattr(module, name))  # under jit, group sizes would not be known
        with _evaluated(module, "make_group_metadata"):
            return function(lhs, rhs, sizes, *self.first, lhs.dtype, self.tiling, **keywords)


def _kernels(
    shape: Shape, tilings: Sequence[Tiling], function: Callable[[_Kernels], Callable[..., Any]]
) -> dict[str, Callable[..., Any]]:
    """A function of the kernels of other libraries, by "peer setting"."""
    fitting = [tiling for tiling in tilings if tiling[1] <= shape.inner]
    by_setting = {f"megablox {_name(tiling)}": _Kernels(_MEGABLOX, tiling) for tiling in fitting}
    if importlib.util.find_spec("tokamax") is not None:
        by_setting[f"tokamax {_name(fitting[0])}"] = _Kernels(_TOKAMAX, fitting[0], (None,))
    return {setting: function(kernels) for setting, kernels in by_setting.items()}


def _name(tiling: Tiling) -> str:
    return "/".join(map(str, tiling))


def _differentiable(kernels: _Kernels) -> Callable[..., Any]:
    """The product with the derivative that megablox gives it."""

    def product(lhs: jax.Array, rhs: jax.Array, sizes: Any) -> jax.Array:
        @jax.custom_vjp
        def of_both(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            return kernels.product(lhs, rhs, sizes)

        def backward(operands: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
            of_lhs = kernels.product(cotangent, operands[1], sizes, transpose_rhs=True)
            return of_lhs, kernels.contracting(operands[0], cotangent, sizes)

        def forward(lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            return of_both(lhs, rhs), (lhs, rhs)

        of_both.defvjp(forward, backward)
        return of_both(lhs, rhs)

    return product


# --- the cases --------------------------------------------------------------------------------------------------------

_SHAPES = {shape.name: shape for shape in SHAPES}
_SCALED = {case.name: case for case in SCALED_CASES}

CASES: tuple[Case, ...] = (
    *_product(_SHAPES["square"]),
    *_product(_SHAPES["mixtral_8x7b_up"]),
    _contracting(_SHAPES["square"]),
    _contracting(_SHAPES["mixtral_8x7b_up"]),
    _scaled(_SCALED["mixtral_8x7b_up:bfloat16:int8"], "bfloat16 × int8"),
    _scaled(_SCALED["qwen3_30b_up:int8:int8"], "int8 × int8"),
    _scaled(_SCALED["qwen3_30b_up:float8_e4m3fn:float8_e4m3fn"], "float8 × float8"),
)
SMALL: tuple[Case, ...] = (_product(replace(_SHAPES["square"], name="small", rows=2048))[0],)
