"""Calls of the library on small arrays, whose dims have names: a name says which dims devices divide together."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np

from tilekern.kernels.adamw_step import adamw_step
from tilekern.kernels.causal_conv1d import causal_conv1d
from tilekern.kernels.cross_entropy import cross_entropy
from tilekern.kernels.distillation import distillation
from tilekern.kernels.flash_attention import flash_attention
from tilekern.kernels.gated_delta_rule import gated_delta_rule
from tilekern.kernels.group_norm import group_norm
from tilekern.kernels.group_norm.parts import group_norm_parts_forward
from tilekern.kernels.layer_norm import layer_norm
from tilekern.kernels.linear_attention import linear_attention, ssd
from tilekern.kernels.matmul import fused_matmul, matmul, symmetric_matmul
from tilekern.kernels.ragged_dot import fused_ragged_dot, ragged_contracting_dot, ragged_dot
from tilekern.kernels.rg_lru import rg_lru
from tilekern.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_quantized
from tilekern.kernels.rope import rms_norm_rope, rope
from tilekern.kernels.selective_scan import selective_scan
from tilekern.kernels.softmax import softmax
from tilekern.kernels.swiglu import swiglu

SIZES = {
    "batch": 4, "tokens": 8, "rows": 16, "columns": 12, "inner": 8, "heads": 8, "groups": 4, "depth": 4, "width": 4,
    "channels": 16, "states": 4, "taps": 3, "words": 24, "experts": 4, "half": 2, "teacher": 8, "four": 4,
}  # fmt: skip
INTEGERS = {
    "labels": lambda shape: np.arange(np.prod(shape)).reshape(shape) * 5 % SIZES["words"],
    "sizes": lambda shape: np.array([5, 0, 7, 2]),
    "ids": lambda shape: np.broadcast_to(np.arange(shape[1]) // 3, shape),
    "positions": lambda shape: np.broadcast_to(np.arange(shape[-1]) + 3, shape),
}


@dataclass(frozen=True)
class Call:
    """A function of arrays.

    Attributes:
      function: of the arrays by position.
      arrays: the arrays and their dims, as "x[rows columns] weight[columns]". Those named in `INTEGERS` are integers.
      has_gradients: whether the function has derivatives.
    """

    function: Callable[..., Any]
    arrays: str
    has_gradients: bool = True

    @cached_property
    def dims(self) -> Mapping[str, tuple[str, ...]]:
        """For each array the names of its dims."""
        return {name: tuple(dims.split()) for name, dims in re.findall(r"(\w+)\[([^]]*)\]", self.arrays)}

    def values(self) -> list[np.ndarray]:
        """Random floats between 0.1 and 1, negative for decays; integers by `INTEGERS`."""
        random, found = np.random.default_rng(0), list[np.ndarray]()
        for name, dims in self.dims.items():
            shape = tuple(SIZES[d] for d in dims)
            floats = random.uniform(0.1, 1, shape) * (-1 if "decay" in name else 1)
            found.append(INTEGERS[name](shape).astype(np.int32) if name in INTEGERS else floats.astype(np.float32))
        return found

    def forward(self, *arrays: Any) -> list[jax.Array]:
        """The results."""
        return jax.tree.leaves(self.function(*arrays))

    def both(self, *arrays: Any) -> tuple[list[jax.Array], list[jax.Array]]:
        """The results, and the cotangents of the arrays of floats for the squares of the results."""
        moving = [n for n, name in enumerate(self.dims) if name not in INTEGERS]

        def of_floats(*floats: Any) -> list[jax.Array]:
            given = dict(zip(moving, floats, strict=True))
            return self.forward(*(given.get(n, x) for n, x in enumerate(arrays)))

        out, pull = jax.vjp(of_floats, *(arrays[n] for n in moving))
        return out, list(pull([x * x for x in out]))


def _gelu_plus(product: Any, bias: Any) -> Any:
    return jax.nn.gelu(product) + bias


def _gated(gate: Any, up: Any) -> Any:
    return jax.nn.silu(gate) * up


_RECURRENCE = "q[batch tokens {0} depth] k[batch tokens {0} depth] v[batch tokens heads width]"
_DECAYS = " decay[batch tokens heads] state[batch heads depth width]"
_ATTENTION = "q[batch tokens heads depth] k[batch tokens {0} depth] v[batch tokens {0} depth]"
_LOSS = "hidden[tokens inner] weight[inner words] "

CALLS = {
    "adamw_step": Call(
        lambda *a: adamw_step(*a, None, (), b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1),
        "param[rows columns] gradient[rows columns] first[rows columns] second[rows columns] factors[four]",
        has_gradients=False,
    ),
    "causal_conv1d": Call(
        partial(causal_conv1d, activation="silu"), "x[batch tokens channels] w[taps channels] bias[channels]"
    ),
    "cross_entropy": Call(cross_entropy, _LOSS + "labels[tokens]"),
    "distillation": Call(distillation, _LOSS + "teacher[tokens teacher] of_teacher[teacher words]"),
    "flash_attention": Call(flash_attention, _ATTENTION.format("heads")),
    "flash_attention, causal": Call(partial(flash_attention, causal=True), _ATTENTION.format("heads")),
    "flash_attention, grouped": Call(partial(flash_attention, causal=True), _ATTENTION.format("groups")),
    "fused_matmul": Call(
        lambda x, w, bias: fused_matmul(x, w, bias, epilogue=_gelu_plus), "x[rows inner] w[inner columns] bias[columns]"
    ),
    "fused_ragged_dot": Call(
        lambda x, gate, up, sizes: fused_ragged_dot(x, (gate, up), sizes, epilogue=_gated),
        "lhs[rows inner] gate[experts inner columns] up[experts inner columns] sizes[experts]",
    ),
    "gated_delta_rule": Call(
        lambda q, k, v, beta, decay, state: gated_delta_rule(q, k, v, beta, decay, state),
        _RECURRENCE.format("heads") + " beta[batch tokens heads]" + _DECAYS,
    ),
    "gated_delta_rule, grouped": Call(
        lambda q, k, v, beta, decay, state: gated_delta_rule(q, k, v, beta, decay, state),
        _RECURRENCE.format("groups") + " beta[batch tokens heads]" + _DECAYS,
    ),
    "gated_delta_rule by channel": Call(
        lambda q, k, v, beta, decay: gated_delta_rule(q, k, v, beta, decay),
        _RECURRENCE.format("heads") + " beta[batch tokens heads] decay[batch tokens heads depth]",
    ),
    "group_norm": Call(
        partial(group_norm, num_groups=8, activation="silu"),
        "x[batch tokens channels] weight[channels] bias[channels]",
    ),
    "group_norm, large": Call(
        lambda x, weight, bias: group_norm_parts_forward(x, weight, bias, size=2, eps=1e-5, activation="silu"),
        "x[batch tokens channels] weight[channels] bias[channels]",
    ),
    "layer_norm": Call(layer_norm, "x[rows columns] weight[columns] bias[columns]"),
    "linear_attention": Call(linear_attention, _RECURRENCE.format("heads") + _DECAYS),
    "linear_attention, grouped": Call(linear_attention, _RECURRENCE.format("groups") + _DECAYS),
    "linear_attention, packed": Call(
        lambda q, k, v, decay, ids: linear_attention(q, k, v, decay, segment_ids=ids),
        _RECURRENCE.format("groups") + " decay[batch tokens heads] ids[batch tokens]",
    ),
    "matmul": Call(matmul, "x[rows inner] w[inner columns]"),
    "matmul of batches": Call(matmul, "x[batch rows inner] w[batch inner columns]"),
    "ragged_contracting_dot": Call(ragged_contracting_dot, "lhs[rows inner] rhs[rows columns] sizes[experts]"),
    "ragged_dot": Call(ragged_dot, "lhs[rows inner] rhs[experts inner columns] sizes[experts]"),
    "rg_lru": Call(
        rg_lru,
        "x[batch tokens channels] input[batch tokens channels] recurrence[batch tokens channels] a[channels]",
    ),
    "rms_norm": Call(rms_norm, "x[rows columns] weight[columns]"),
    "add_rms_norm": Call(add_rms_norm, "x[rows columns] residual[rows columns] weight[columns]"),
    "rms_norm_quantized": Call(rms_norm_quantized, "x[rows columns] weight[columns]", has_gradients=False),
    "rms_norm_rope": Call(rms_norm_rope, "x[batch tokens heads depth] weight[depth] positions[batch tokens]"),
    "rope": Call(rope, "x[batch tokens heads depth] positions[batch tokens]"),
    "selective_scan": Call(
        selective_scan,
        "x[batch tokens channels] delta[batch tokens channels] decays[channels states] b[batch tokens states] "
        "c[batch tokens states] d[channels] z[batch tokens channels]",
    ),
    "softmax": Call(softmax, "x[rows columns]"),
    "ssd": Call(
        ssd,
        "x[batch tokens heads width] dt[batch tokens heads] decay[heads] b[batch tokens groups depth] "
        "c[batch tokens groups depth] d[heads]",
    ),
    "swiglu": Call(swiglu, "gate[rows columns] up[rows columns]"),
    "symmetric_matmul": Call(symmetric_matmul, "x[rows inner]"),
}
