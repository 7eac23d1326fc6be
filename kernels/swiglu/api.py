"""The public function: checks and leading dims."""

from __future__ import annotations

import jax

from tilekern.authoring import hide_frames, takes_python_numbers
from tilekern.errors import ArgumentError
from tilekern.kernels.checks import as_rows, is_float, require
from tilekern.kernels.swiglu.kernel import swiglu_forward
from tilekern.kernels.swiglu.reference import ACTIVATIONS

hide_frames(__file__)


@takes_python_numbers
def swiglu(
    gate: jax.Array,
    up: jax.Array,
    *,
    activation: str = "silu",
    target: str | None = None,
    block_rows: int | None = None,
    block_columns: int | None = None,
) -> jax.Array:
    """silu(gate) * up, elementwise, with silu(g) = g / (1 + exp(-g)), computed in float32 (float64 for float64).

    In a transformer gate = x @ w_gate and up = x @ w_up. Other activations make geglu, reglu and glu of it. Source:
    Shazeer 2020, https://arxiv.org/abs/2002.05202, equations 5 and 6.

    Args:
      gate: [*B, C], float32, bfloat16, float16 or float64.
      up: of the same shape and dtype.
      activation: "silu"; "gelu" or its approximation "gelu_tanh" for geglu, "relu" for reglu, "sigmoid" for glu: the
        functions of `jax.nn`.
      target: lower for this target's blocks, e.g. "cpu:xla".
      block_rows: rows of a tile, instead of the schedule's; no block changes the result.
      block_columns: elements of a row in a tile.

    Returns:
      An array like gate.

    Raises:
      tilekern.errors.ArgumentError: shapes or dtypes do not fit, or there is no such activation.

    Example:
      >>> import jax.numpy as jnp
      >>> from tilekern.kernels.swiglu import swiglu
      >>> swiglu(jnp.array([0.0, 100.0]), jnp.array([5.0, 5.0]))
      Array([  0., 500.], dtype=float32)
    """
    fits = is_float(gate) and is_float(up) and gate.ndim > 0
    require(
        fits and (gate.shape, gate.dtype) == (up.shape, up.dtype),
        "swiglu",
        expected="gate[*B, C] and up[*B, C] of one float dtype of at least 16 bits",
        fix="broadcast with jnp.broadcast_to, cast with .astype",
        gate=gate,
        up=up,
    )
    if activation not in ACTIVATIONS:
        names = ", ".join(f'"{name}"' for name in ACTIVATIONS)
        raise ArgumentError(
            "swiglu has no such activation",
            expected=f"one of {names}",
            got=f"activation = {activation!r}",
            fix="matmul.fused_matmul takes any function as its epilogue",
        )
    blocks = {"block_rows": block_rows, "block_columns": block_columns}
    out = swiglu_forward(as_rows(gate), as_rows(up), activation=activation, target=target, **blocks)
    return out.reshape(gate.shape)
