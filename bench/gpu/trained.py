"""More kernels that are checked: gradients, fused kernels, products that are added up or have scales, and experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from bench import formulas
from bench.gpu import kernels
from bench.gpu.gradients import pulled, with_gradients
from bench.gpu.kernels import ROWS, TOKENS, Kernel, resized
from tilekern.distributed import moe
from tilekern.kernels import distillation, ragged_dot
from tilekern.kernels.distillation import reference as distillation_reference
from tilekern.kernels.gated_delta_rule.cases import CASES as DELTA_RULES
from tilekern.kernels.matmul import fused_matmul, fused_reference, symmetric_matmul, symmetric_reference
from tilekern.kernels.matmul.cases import CASES as PRODUCTS
from tilekern.kernels.ragged_dot import contracting_reference, ragged_contracting_dot, scaled_reference
from tilekern.kernels.ragged_dot import reference as ragged_dot_reference
from tilekern.kernels.ragged_dot.cases import CASES as GROUPS
from tilekern.kernels.ragged_dot.cases import SCALED_CASES, ScaledCase
from tilekern.kernels.rms_norm import add_reference, add_rms_norm
from tilekern.kernels.rms_norm.cases import CASES as RMS_NORMS
from tilekern.kernels.rope import normed_reference, rms_norm_rope
from tilekern.kernels.rope.cases import CASES as ROTATIONS

Arrays = list[jax.Array]
WIDE = ("bfloat16", "float32")
SMALL_GROUPS = ({"rows": 517, "inner": 333, "columns": 301, "groups": 7}, {"rows": 1024, "inner": 512})


@dataclass(frozen=True)
class DerivedCase:
    """A case whose arrays are made from another case.

    Attributes:
      case: has a name, sizes and maybe keywords.
      make: makes the arrays of the case from it, a key and a dtype.
      names: the keywords of the case that the kernel takes; None for all keywords.
    """

    case: Any
    make: Callable[[Any, jax.Array, Any], Arrays]
    names: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        """The name of the case."""
        return self.case.name

    @property
    def keywords(self) -> dict[str, Any]:
        """The keywords of the kernel and of its definition."""
        keywords = getattr(self.case, "keywords", {})
        return keywords if self.names is None else {name: keywords[name] for name in self.names}

    def arrays(self, key: jax.Array, dtype: Any) -> Arrays:
        """The arrays."""
        return self.make(self.case, key, dtype)

    def small(self) -> DerivedCase:
        """The smaller case, with arrays made in the same way."""
        return replace(self, case=self.case.small())


def derived_cases(
    make: Callable[..., Arrays], cases: Sequence[Any], names: tuple[str, ...] | None = None
) -> tuple[DerivedCase, ...]:
    """`cases`, whose arrays `make` makes from the case, a key and a dtype."""
    return tuple(DerivedCase(case, make, names) for case in cases)


# --- gradients --------------------------------------------------------------------------------------------------------


def _rows(x: Any, *unused: Any) -> int:
    return x.size // x.shape[-1] + x.shape[-1]


def _tokens(x: Any, *unused: Any) -> int:
    """Terms of a sum over tokens, each of which is the end of a dozen of rounded operations."""
    return 12 * x.shape[0] * x.shape[1] + x.shape[-1]


def _all(x: Any, *unused: Any) -> int:
    return x.size


def gradient_of(kernel: Kernel, length: Callable[..., int], dtypes: tuple[str, ...] = WIDE) -> Kernel:
    """A kernel's results, and its gradients by all float arrays, on its large cases."""
    return replace(
        kernel,
        cases=(),
        call=partial(with_gradients, kernel.call),
        reference=partial(with_gradients, kernel.reference),
        length=length,
        factor=3.0,
        dtypes=dtypes,
        specials=False,
    )


def of_student(function: Callable[..., Any], hidden: Any, weight: Any, *teacher: Any, **keywords: Any) -> Arrays:
    """The loss of distillation, and its gradients by the student's arrays; the teacher is a constant."""
    return pulled(lambda hidden, weight: function(hidden, weight, *teacher, **keywords), (hidden, weight))


# --- fused kernels ----------------------------------------------------------------------------------------------------


def gelu_of_sum(product: jax.Array, bias: jax.Array) -> jax.Array:
    """The epilogue of the first layer of an MLP."""
    return jax.nn.gelu(product + bias)


def with_bias(case: Any, key: jax.Array, dtype: Any) -> Arrays:
    """The arrays of a product, and a bias of columns."""
    return [*case.arrays(key, dtype), jax.random.normal(jax.random.fold_in(key, 1), (case.columns,), dtype)]


def _with_square(case: Any, key: jax.Array, dtype: Any) -> Arrays:
    """A matrix [rows, inner], and a symmetric matrix [rows, rows] to add."""
    x, _ = case.arrays(key, dtype)
    square = jax.random.normal(jax.random.fold_in(key, 1), (case.rows, case.rows), dtype)
    return [x / case.inner**0.5, jnp.tril(square) + jnp.tril(square, -1).T]


def _with_residual(case: Any, key: jax.Array, dtype: Any) -> Arrays:
    x, weight = case.arrays(key, dtype)
    return [x, jax.random.normal(jax.random.fold_in(key, 1), x.shape, dtype), weight]


def _with_weight(case: Any, key: jax.Array, dtype: Any) -> Arrays:
    x, _ = case.arrays(key, dtype)
    return [x, 1 + 0.1 * jax.random.normal(jax.random.fold_in(key, 1), x.shape[-1:], dtype)]


LARGE_PRODUCTS = resized(
    PRODUCTS,
    {"rows": 517, "inner": 1000, "columns": 301},
    {"rows": 1024, "inner": 512, "columns": 768},
)
FUSED = {
    "fused_matmul": Kernel(
        partial(fused_matmul, epilogue=gelu_of_sum),
        partial(fused_reference, epilogue=gelu_of_sum),
        derived_cases(with_bias, PRODUCTS[:4]),
        derived_cases(with_bias, LARGE_PRODUCTS),
        lambda x, *unused: x.shape[-1],
    ),
    "symmetric_matmul": Kernel(
        partial(symmetric_matmul, scale=-0.5, scale_added=2.0),
        partial(symmetric_reference, scale=-0.5, scale_added=2.0),
        derived_cases(_with_square, PRODUCTS[:2]),
        derived_cases(_with_square, LARGE_PRODUCTS),
        lambda x, *unused: x.shape[-1],
    ),
    "add_rms_norm": Kernel(
        add_rms_norm,
        add_reference,
        derived_cases(_with_residual, RMS_NORMS[:3]),
        derived_cases(_with_residual, resized(RMS_NORMS, *ROWS)),
        lambda x, *unused: x.shape[-1],
    ),
    "rms_norm_rope": Kernel(
        rms_norm_rope,
        normed_reference,
        derived_cases(_with_weight, ROTATIONS[:2], ("theta",)),
        derived_cases(_with_weight, resized(ROTATIONS, {"length": 301, "heads": 11}), ("theta",)),
        lambda x, *unused: x.shape[-1],
    ),
}


# --- products that are added, or have scales --------------------------------------------------------------------------


def added_to(function: Callable[..., jax.Array], total: jax.Array, *arrays: jax.Array) -> jax.Array:
    """A product that is added to an array."""
    return function(*arrays, accumulate=total)


def sum_with(function: Callable[..., jax.Array], total: jax.Array, *arrays: jax.Array, dtype: Any = None) -> jax.Array:
    """The definition of `added_to`, computed in `dtype`; None for at least float32."""
    lhs, rhs, sizes = arrays
    wide = dtype or jnp.promote_types(total.dtype, jnp.float32)
    return (total.astype(wide) + function(lhs.astype(wide), rhs.astype(wide), sizes)).astype(total.dtype)


def _with_total(case: Any, key: jax.Array, dtype: Any) -> Arrays:
    """A float32 array of the product's shape, and its operands."""
    total = jax.random.normal(jax.random.fold_in(key, 1), (case.rows, case.columns), jnp.float32)
    return [total, *case.arrays(key, dtype)]


def _contracting(case: Any, key: jax.Array, dtype: Any) -> Arrays:
    """Rows of both operands, [rows, inner] and [rows, columns], and the sizes of groups."""
    lhs, _, sizes = case.arrays(key, dtype)
    return [lhs, jax.random.normal(jax.random.fold_in(key, 2), (case.rows, case.columns), dtype), sizes]


def _contracting_with_total(case: Any, key: jax.Array, dtype: Any) -> Arrays:
    shape = case.groups, case.inner, case.columns
    total = jax.random.normal(jax.random.fold_in(key, 1), shape, jnp.float32)
    return [total, *_contracting(case, key, dtype)]


def flat(case: ScaledCase, key: jax.Array, dtype: Any = None) -> Arrays:
    """Operands and sizes, then scales, first the scales of rows; dtypes are the case's own."""
    del dtype
    *arrays, scales = case.arrays(key)
    return [*arrays, *scales.values()]


def by_scales(function: Callable[..., Any], lhs: Any, rhs: Any, sizes: Any, *scales: Any, **keywords: Any) -> Any:
    """A grouped product by scales of the matrices, or of rows and matrices."""
    names = ("lhs_scale", "rhs_scale")[2 - len(scales) :]
    return function(lhs, rhs, sizes, **dict(zip(names, scales, strict=True)), **keywords)


def scaled_definition(*arrays: Any, dtype: Any = None) -> jax.Array:
    """The definition of a product by scales, in bfloat16; in float64 for scales of float64."""
    *_, scale = arrays
    exact = scale.dtype == jnp.float64
    wide = scale.dtype if exact or dtype is None else dtype
    out = scale.dtype if exact else jnp.bfloat16
    return by_scales(scaled_reference, *arrays, dtype=wide, out_dtype=out)


def large_scaled() -> tuple[ScaledCase, ...]:
    """Each kind of scales, with ragged groups; blocks of 128 numbers divide the inner dim."""
    return tuple(
        replace(scaled, case=replace(scaled.case, rows=517, inner=384, columns=256, groups=7))
        for scaled in SCALED_CASES
        if scaled.case.rows > 32
    )


GROUPED = {
    "ragged_contracting_dot": Kernel(
        ragged_contracting_dot,
        contracting_reference,
        (),
        derived_cases(_contracting, resized(GROUPS, *SMALL_GROUPS)),
        lambda lhs, *unused: lhs.shape[0],
        dtyped=False,
    ),
    "ragged_dot accumulate": Kernel(
        partial(added_to, ragged_dot),
        partial(sum_with, ragged_dot_reference),
        (),
        derived_cases(_with_total, resized(GROUPS, *SMALL_GROUPS)),
        lambda total, lhs, *unused: lhs.shape[1],
    ),
    "ragged_contracting_dot accumulate": Kernel(
        partial(added_to, ragged_contracting_dot),
        partial(sum_with, contracting_reference),
        (),
        derived_cases(_contracting_with_total, resized(GROUPS, *SMALL_GROUPS)),
        lambda total, lhs, *unused: lhs.shape[0],
    ),
    "ragged_dot scales": Kernel(
        partial(by_scales, ragged_dot),
        scaled_definition,
        (),
        derived_cases(flat, large_scaled()),
        lambda lhs, *unused: lhs.shape[1],
        dtypes=("bfloat16",),
    ),
}


# --- experts ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Experts:
    """x[tokens, hidden], logits of experts in float32, and the matrices of experts."""

    name: str
    tokens: int
    hidden: int
    inner: int
    experts: int

    def arrays(self, key: jax.Array, dtype: Any) -> Arrays:
        """Standard normal; elements of products have a standard deviation of 1."""
        shape = self.experts, self.hidden, self.inner
        for_x, for_logits, *matrix_keys = jax.random.split(key, 5)
        logits = jax.random.normal(for_logits, (self.tokens, self.experts), jnp.float32)
        gate, up, down = (jax.random.normal(k, shape, dtype) for k in matrix_keys)
        x = jax.random.normal(for_x, (self.tokens, self.hidden), dtype)
        return [x, logits, *(w / self.hidden**0.5 for w in (gate, up)), down.swapaxes(1, 2) / self.inner**0.5]


def mixture(*arrays: jax.Array, target: str | None = None) -> jax.Array:
    """`moe` with two experts for each token."""
    return moe(*arrays, experts_per_token=2, target=target)


MIXTURE = Kernel(
    mixture,
    partial(formulas.mixture, chosen=2),
    (),
    (Experts("mixtral", 301, 256, 384, 8), Experts("many", 256, 128, 64, 60)),
    lambda x, logits, gate, *unused: gate.shape[1] + gate.shape[2],
)

# --- all --------------------------------------------------------------------------------------------------------------

BY_CHANNEL = resized(DELTA_RULES[2:], {**TOKENS[0], "groups": 4}, TOKENS[1])
FORWARD = kernels.KERNELS
KERNELS = {
    "gated_delta_rule by channel": replace(FORWARD["gated_delta_rule"], cases=(), large=BY_CHANNEL),
    **FUSED,
    **GROUPED,
    "moe": MIXTURE,
    "distillation_gradient": replace(
        FORWARD["distillation"],
        cases=(),
        call=partial(of_student, distillation),
        reference=partial(of_student, distillation_reference),
        length=lambda hidden, weight, *teacher: sum(weight.shape) + hidden.shape[0],
        factor=3.0,
        dtypes=WIDE,
    ),
    "moe_gradient": gradient_of(MIXTURE, lambda x, logits, gate, *unused: 2 * gate.size),
    **{
        f"{name}_gradient": gradient_of(kernel, _tokens)
        for name in ("linear_attention", "gated_delta_rule", "rg_lru", "selective_scan", "causal_conv1d")
        for kernel in (FORWARD[name],)
    },
    "gated_delta_rule_gradient by channel": gradient_of(
        replace(FORWARD["gated_delta_rule"], large=BY_CHANNEL), _tokens
    ),
    "ragged_dot_gradient": gradient_of(FORWARD["ragged_dot"], _rows),
    "fused_ragged_dot_gradient": gradient_of(FORWARD["fused_ragged_dot"], _rows),
    "fused_matmul_gradient": gradient_of(FUSED["fused_matmul"], _rows),
    **{
        f"{name}_gradient": gradient_of(kernel, _all)
        for name in ("group_norm", "layer_norm", "rms_norm", "softmax", "swiglu", "rope")
        for kernel in (FORWARD[name],)
    },
    **{f"{name}_gradient": gradient_of(FUSED[name], _all) for name in ("add_rms_norm", "rms_norm_rope")},
}
