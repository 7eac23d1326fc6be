"""Calls of every function of the library, with a letter for each dim of their arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tilekern import kernels, nn

type Maker = Callable[[tuple[int, ...], Mapping[str, int]], np.ndarray]


def floats(shape: tuple[int, ...], sizes: Mapping[str, int]) -> np.ndarray:
    return np.random.default_rng(sum(shape)).uniform(0.1, 1, shape).astype(np.float32)


def small(shape: tuple[int, ...], sizes: Mapping[str, int]) -> np.ndarray:
    """0 and 1, in turns."""
    return (np.arange(np.prod(shape)) % 2).astype(np.int32).reshape(shape)


def lengths(shape: tuple[int, ...], sizes: Mapping[str, int]) -> np.ndarray:
    return (1 + 5 * np.arange(shape[0]) % 8).astype(np.int32)


def groups(shape: tuple[int, ...], sizes: Mapping[str, int]) -> np.ndarray:
    """Sizes of groups, one of which is empty; the last row is in no group."""
    rows = sizes["M"] - 1
    return np.array([rows // 3, *(0 for _ in range(shape[0] - 2)), rows - rows // 3], np.int32)


def starts(shape: tuple[int, ...], sizes: Mapping[str, int]) -> np.ndarray:
    """The first token of each of three sequences, and the end of the last one; the last token is in no sequence."""
    tokens = sizes["T"]
    return np.array([0, tokens // 2, tokens // 2 + 1, tokens - 1], np.int32)


def eights(shape: tuple[int, ...], sizes: Mapping[str, int]) -> np.ndarray:
    return (np.arange(np.prod(shape)) % 15 - 7).astype(np.int8).reshape(shape)


class Call(NamedTuple):
    """A call with arrays whose dims have letters.

    Attributes:
      function: of the arrays.
      shapes: of each array, a letter or a number for each dim.
      makers: of arrays that are not floats, by their place.
    """

    function: Callable[..., Any]
    shapes: tuple[str, ...]
    makers: Mapping[int, Maker] = {}


SIZES = {
    "B": 3, "T": 6, "S": 6, "N": 4, "K": 2, "H": 8, "C": 8, "D": 8, "V": 16, "M": 6, "G": 3, "E": 4, "F": 8, "P": 2,
    "I": 5, "L": 4, "J": 3, "W": 4, "U": 12, "R": 3,
}  # fmt: skip
KEY = jax.random.key(0)

CALLS: dict[str, Call] = {
    "softmax": Call(kernels.softmax, ("BTC",)),
    "log_softmax": Call(kernels.log_softmax, ("BTC",)),
    "rms_norm": Call(kernels.rms_norm, ("BTC", "C")),
    "add_rms_norm": Call(kernels.add_rms_norm, ("BTC", "BTC", "C")),
    "rms_norm_quantized": Call(kernels.rms_norm_quantized, ("BTC", "C")),
    "layer_norm": Call(kernels.layer_norm, ("BTC", "C", "C")),
    "group_norm": Call(lambda x, w: kernels.group_norm(x, w, num_groups=2), ("BTC", "C")),
    "swiglu": Call(kernels.swiglu, ("BTC", "BTC")),
    "rope": Call(kernels.rope, ("BTNH", "BT"), {1: small}),
    "rope of common positions": Call(kernels.rope, ("BTNH", "T"), {1: small}),
    "rms_norm_rope": Call(kernels.rms_norm_rope, ("BTNH", "H", "BT"), {2: small}),
    "matmul": Call(kernels.matmul, ("BMD", "DV")),
    "matmul of batches": Call(kernels.matmul, ("BMD", "BDV")),
    "fused_matmul": Call(
        lambda x, w, b: kernels.fused_matmul(x, w, b, epilogue=lambda x, b: jnp.tanh(x) + b), ("BMD", "DV", "V")
    ),
    "quantized_matmul": Call(
        lambda x, w: kernels.quantized_matmul(x, w, rhs_dtype="int8", lhs_dtype="int8"), ("BMD", "DV")
    ),
    "symmetric_matmul": Call(kernels.symmetric_matmul, ("BMD",)),
    "ragged_dot": Call(kernels.ragged_dot, ("MD", "GDV", "G"), {2: groups}),
    "ragged_dot of bytes": Call(
        lambda x, w, g, s: kernels.ragged_dot(x, w, g, rhs_scale=s), ("MD", "GDV", "G", "G1V"), {1: eights, 2: groups}
    ),
    "ragged_contracting_dot": Call(kernels.ragged_contracting_dot, ("MD", "MV", "G"), {2: groups}),
    "fused_ragged_dot": Call(
        lambda x, w, g, s: kernels.fused_ragged_dot(x, w, g, s, epilogue=lambda x, s: jnp.tanh(x) * s),
        ("MD", "GDV", "G", "M1"),
        {2: groups},
    ),
    "cross_entropy": Call(kernels.cross_entropy, ("BTD", "DV", "BT"), {2: small}),
    "distillation": Call(kernels.distillation, ("TD", "DV", "TF", "FV")),
    "flash_attention": Call(kernels.flash_attention, ("BTNH", "BSKH", "BSKH")),
    "causal_conv1d": Call(kernels.causal_conv1d, ("BTC", "WC")),
    "linear_attention": Call(lambda q, k, v, d: kernels.linear_attention(q, k, v, -d), ("BTKH", "BTKH", "BTNC", "BTN")),
    "ssd": Call(lambda x, dt, a, b, c: kernels.ssd(x, dt, -a, b, c), ("BTNH", "BTN", "N", "BTKC", "BTKC")),
    "gated_delta_rule": Call(
        lambda q, k, v, b, d: kernels.gated_delta_rule(q, k, v, b / 8, -d), ("BTKH", "BTKH", "BTNC", "BTN", "BTN")
    ),
    "rg_lru": Call(kernels.rg_lru, ("BTC", "BTC", "BTC", "C")),
    "selective_scan": Call(
        lambda x, dt, a, b, c: kernels.selective_scan(x, dt, -a, b, c), ("BTC", "BTC", "CL", "BTL", "BTL")
    ),
    "sample": Call(lambda x: kernels.sample(x, KEY, top_k=3), ("BV",)),
    "sample_hidden": Call(lambda x, w: kernels.sample_hidden(x, w, KEY), ("BD", "DV")),
    "verify_drafts": Call(lambda x, t: kernels.verify_drafts(x, t, KEY), ("B3V", "B2"), {1: small}),
    "verify_draft_tree": Call(
        lambda x, t: kernels.verify_draft_tree(x, t, jnp.array([-1, 0]), KEY), ("B3V", "B2"), {1: small}
    ),
    "paged_attention": Call(kernels.paged_attention, ("BNH", "I44H", "B", "BP"), {2: lengths, 3: small}),
    "ragged_paged_attention": Call(
        kernels.ragged_paged_attention, ("TNH", "I44H", "R", "RP", "4"), {2: lengths, 3: small, 4: starts}
    ),
    "mla_attention": Call(
        lambda q, kv, n, p: kernels.mla_attention(q, kv, n, p, scale=0.5, value_width=8),
        ("BNU", "I4U", "B", "BP"),
        {2: lengths, 3: small},
    ),
    "index_scores": Call(kernels.index_scores, ("BJH", "BJ", "I4H", "B", "BP"), {3: lengths, 4: small}),
    "select_keys": Call(
        lambda *a: kernels.select_keys(*a, num_keys=2), ("BJH", "BJ", "I4H", "B", "BP"), {3: lengths, 4: small}
    ),
    "write_pages": Call(kernels.write_pages, ("I44H", "TKH", "TKH", "R", "RP", "4"), {3: lengths, 4: small, 5: starts}),
    "write_latents": Call(
        lambda *arrays: kernels.write_latents(*arrays, value_width=8),
        ("I4U", "TU", "R", "RP", "4"),
        {2: lengths, 3: small, 4: starts},
    ),
    "write_index_keys": Call(
        kernels.write_index_keys, ("I4H", "TH", "R", "RP", "4"), {2: lengths, 3: small, 4: starts}
    ),
    "copy_pages": Call(kernels.copy_pages, ("I44H", "R", "R"), {1: small, 2: lengths}),
    "adamw_step": Call(
        lambda *arrays: kernels.adamw_step(*arrays, jnp.ones(4), None, (), b1=0.5, b2=0.5, eps=0.5, weight_decay=0.5),
        ("MC",) * 4,
    ),
    "QuantizedArray.quantize": Call(lambda x: kernels.QuantizedArray.quantize(x).dequantize(), ("BMC",)),
    "nn.dot_product_attention": Call(nn.dot_product_attention, ("BTNH", "BSKH", "BSKH")),
    "nn.attention_fn": Call(lambda q, k, v: nn.attention_fn(q, k, v), ("BTNH", "BSNH", "BSNH")),
    "nn.softmax": Call(nn.softmax, ("BTC",)),
    "nn.log_softmax": Call(nn.log_softmax, ("BTC",)),
    "nn.rms_norm": Call(nn.rms_norm, ("BTC", "C")),
    "nn.layer_norm": Call(nn.layer_norm, ("BTC", "C", "C")),
    "nn.group_norm": Call(lambda x: nn.group_norm(x, num_groups=2), ("BTC",)),
    "nn.scaled_matmul": Call(nn.scaled_matmul, ("BMD", "BVD", "BM1", "BV1")),
    "nn.ragged_dot": Call(nn.ragged_dot, ("MD", "GDV", "G"), {2: groups}),
    "nn.moe": Call(lambda x, r, g, u, d: nn.moe(x, r, g, u, d, experts_per_token=2), ("TD", "TE", "EDF", "EDF", "EFD")),
}
