"""The kernels that are checked, forward, with their definitions and cases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from bench.gpu import gradients
from bench.gpu.gradients import FEATURES, Featured
from tilekern.kernels import (
    adamw_step,
    causal_conv1d,
    cross_entropy,
    distillation,
    flash_attention,
    gated_delta_rule,
    group_norm,
    index_scores,
    layer_norm,
    linear_attention,
    matmul,
    mla_attention,
    paged_attention,
    ragged_dot,
    rg_lru,
    rms_norm,
    rope,
    sample,
    sample_hidden,
    selective_scan,
    softmax,
    swiglu,
)
from tilekern.kernels.adamw_step import reference as adamw_step_reference
from tilekern.kernels.adamw_step.cases import CASES as WEIGHTS
from tilekern.kernels.causal_conv1d import reference as causal_conv1d_reference
from tilekern.kernels.causal_conv1d.cases import CASES as CONVOLUTIONS
from tilekern.kernels.cross_entropy.cases import CASES as LOSSES
from tilekern.kernels.cross_entropy.reference import reference_with_logsumexp as losses_with_logsumexp
from tilekern.kernels.distillation import reference as distillation_reference
from tilekern.kernels.distillation.cases import CASES as DISTILLATIONS
from tilekern.kernels.flash_attention.cases import CASES as ATTENTIONS
from tilekern.kernels.flash_attention.cases import Case as Attention
from tilekern.kernels.flash_attention.reference import reference_with_logsumexp as attention_with_logsumexp
from tilekern.kernels.gated_delta_rule import reference as gated_delta_rule_reference
from tilekern.kernels.gated_delta_rule.cases import CASES as DELTA_RULES
from tilekern.kernels.group_norm import reference as group_norm_reference
from tilekern.kernels.group_norm.cases import CASES as GROUP_NORMS
from tilekern.kernels.group_norm.cases import LARGE as LARGE_GROUPS
from tilekern.kernels.index_scores import reference as index_scores_reference
from tilekern.kernels.index_scores.cases import CASES as INDEXERS
from tilekern.kernels.layer_norm import reference as layer_norm_reference
from tilekern.kernels.layer_norm.cases import CASES as LAYER_NORMS
from tilekern.kernels.linear_attention import reference as linear_attention_reference
from tilekern.kernels.linear_attention.cases import CASES as LINEAR_ATTENTIONS
from tilekern.kernels.matmul import reference as matmul_reference
from tilekern.kernels.matmul.cases import CASES as PRODUCTS
from tilekern.kernels.mla_attention import reference as mla_attention_reference
from tilekern.kernels.mla_attention.cases import CASES as LATENTS
from tilekern.kernels.paged_attention import reference as paged_attention_reference
from tilekern.kernels.paged_attention.cases import CASES as CACHES
from tilekern.kernels.ragged_dot import fused_ragged_dot, fused_reference
from tilekern.kernels.ragged_dot import reference as ragged_dot_reference
from tilekern.kernels.ragged_dot.cases import CASES as GROUPS
from tilekern.kernels.rg_lru import reference as rg_lru_reference
from tilekern.kernels.rg_lru.cases import CASES as GATED_UNITS
from tilekern.kernels.rms_norm import reference as rms_norm_reference
from tilekern.kernels.rms_norm.cases import CASES as RMS_NORMS
from tilekern.kernels.rope import reference as rope_reference
from tilekern.kernels.rope.cases import CASES as ROTATIONS
from tilekern.kernels.sample.cases import CASES as LOGITS
from tilekern.kernels.sample.cases import HIDDEN_CASES
from tilekern.kernels.selective_scan import reference as selective_scan_reference
from tilekern.kernels.selective_scan.cases import CASES as SELECTIVE_SCANS
from tilekern.kernels.softmax import reference as softmax_reference
from tilekern.kernels.softmax.cases import CASES as SOFTMAXES
from tilekern.kernels.swiglu import reference as swiglu_reference
from tilekern.kernels.swiglu.cases import CASES as GATES

DTYPES = ("bfloat16", "float32", "float16")


@dataclass(frozen=True)
class Kernel:
    """A library kernel.

    Attributes:
      call: tilekern's function.
      reference: its definition, with the same results.
      cases: sizes of real models, of which smaller versions are checked.
      large: cases that are checked at their own size: many tiles, with ragged edges.
      length: returns the number of terms of the longest sum, for the arrays of a call.
      dtyped: True if the definition takes the dtype to compute in.
      factor: limit of the error, as a multiple of the naive computation's; see `tilekern.testing`.
      dtypes: the dtypes of the large cases.
      specials: True if the first large case is checked with NaN and infinities, too. False for kernels with weights,
        states or factors of all elements, where a NaN makes all later results NaN, and for gradients, where a NaN in a
        cotangent reaches all tiles that are not skipped.
    """

    call: Callable[..., Any]
    reference: Callable[..., Any]
    cases: tuple[Any, ...]
    large: tuple[Any, ...]
    length: Callable[..., int]
    dtyped: bool = True
    factor: float = 2.0
    dtypes: tuple[str, ...] = DTYPES
    specials: bool = False


def product(x: jax.Array, w: jax.Array, target: str | None = None, **options: int) -> jax.Array:
    """`matmul` as a plain function, which `partial` and processes can handle."""
    return matmul(x, w, target=target, **options)


def silu_gate(gate: jax.Array, up: jax.Array) -> jax.Array:
    """The epilogue of an expert's first layer."""
    return jax.nn.silu(gate) * up


def gated_experts(
    function: Callable[..., jax.Array], lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, **keywords: Any
) -> jax.Array:
    """The first layer of experts, with the matrices of gate and up from one array."""
    return function(lhs, (rhs, jnp.flip(rhs, 1)), sizes, epilogue=silu_gate, **keywords)


def stepped(function: Callable[..., Any], *arrays: jax.Array, **keywords: Any) -> Any:
    """A step of AdamW, with the keys and the coordinates of its rounding behind the other arrays, if there are any."""
    *matrices, factors = arrays[:5]
    return function(*matrices, factors, arrays[5] if arrays[5:] else None, arrays[6:], **keywords)


def _columns(x: Any, *unused: Any) -> int:
    del unused
    return x.shape[-1]


def _tokens_and_depth(query: Any, *unused: Any) -> int:
    del unused
    return query.shape[1] + query.shape[3]


def _longest_of_loss(hidden: Any, weight: Any, labels: Any) -> int:
    return labels.shape[0] + sum(weight.shape)


def resized(cases: Sequence[Any], *sizes: dict[str, Any]) -> tuple[Any, ...]:
    """Variants of the first case, with the given sizes."""
    return tuple(replace(cases[0], name=f"large{n}", **size) for n, size in enumerate(sizes))


ROWS = ({"rows": 301, "columns": 1037}, {"rows": 67, "columns": 9001})
TOKENS = (
    {"tokens": 333, "heads": 4, "groups": 2, "depth": 128, "width": 128},
    {"tokens": 512, "heads": 2, "groups": 2, "depth": 64, "width": 200},
)
# Tokens behind a tanh depend on its roundings.
HIDDENS = tuple(case for case in HIDDEN_CASES if case.softcap is None)
# Head widths of the timed cases, with whole tiles: ragged tiles have other masks and copies.
WHOLE = tuple(
    Attention(f"d{d}_{'causal' if causal else 'full'}", 4, 4, d, d, 1024, 1024, causal=causal)
    for d in (64, 128, 256)
    for causal in (False, True)
)
LARGE_LOSSES = resized(
    LOSSES,
    {"tokens": 301, "width": 333, "vocabulary": 1037},
    {"tokens": 256, "width": 512, "vocabulary": 4096},
)
KERNELS = {
    "flash_attention": Kernel(
        partial(flash_attention, return_logsumexp=True),
        attention_with_logsumexp,
        ATTENTIONS,
        (*resized(ATTENTIONS, {"queries": 300, "keys": 517}, {"queries": 517, "keys": 300, "causal": False}), *WHOLE),
        lambda q, k, v: q.shape[-1] + k.shape[-3],
        specials=True,
    ),
    "flash_attention_gradient": Kernel(
        gradients.ours,
        gradients.definition,
        # Small cases without features; then each feature once, with a few ragged tiles and grouped heads.
        (
            *map(Featured, ATTENTIONS),
            *(Featured(Attention("few", 4, 2, 64, 32, 300, 333, batch=2), f) for f in FEATURES),
        ),
        (
            *map(Featured, resized(ATTENTIONS, {"queries": 300, "keys": 517})),
            *(Featured(case) for case in WHOLE if case.width < 256 or case.causal),
        ),
        gradients.longest_sum,
        factor=3.0,
    ),
    "matmul": Kernel(
        product,
        matmul_reference,
        PRODUCTS,
        resized(
            PRODUCTS,
            {"rows": 517, "inner": 1000, "columns": 301},
            {"rows": 301, "inner": 77, "columns": 1024},
            {"rows": 1024, "inner": 512, "columns": 768},
        ),
        _columns,
        dtyped=False,
        specials=True,
    ),
    "ragged_dot": Kernel(
        ragged_dot,
        ragged_dot_reference,
        GROUPS,
        resized(GROUPS, {"rows": 517, "inner": 333, "columns": 301, "groups": 7}, {"rows": 1024, "inner": 512}),
        _columns,
        dtyped=False,
    ),
    "fused_ragged_dot": Kernel(
        partial(gated_experts, fused_ragged_dot),
        partial(gated_experts, fused_reference),
        GROUPS,
        resized(GROUPS, {"rows": 517, "inner": 333, "columns": 301, "groups": 7}, {"rows": 1024, "inner": 512}),
        _columns,
        specials=True,
    ),
    "cross_entropy": Kernel(
        partial(cross_entropy, return_logsumexp=True),
        losses_with_logsumexp,
        LOSSES,
        LARGE_LOSSES,
        _longest_of_loss,
    ),
    "cross_entropy_gradient": Kernel(
        partial(gradients.of_loss, partial(cross_entropy, return_logsumexp=True)),
        partial(gradients.of_loss, losses_with_logsumexp),
        LOSSES,
        LARGE_LOSSES,
        _longest_of_loss,
        factor=3.0,
    ),
    "distillation": Kernel(
        distillation,
        distillation_reference,
        DISTILLATIONS,
        resized(DISTILLATIONS, {"tokens": 301, "width": 333, "of_teacher": 77, "vocabulary": 1037}),
        lambda hidden, weight, *teacher: sum(weight.shape),
    ),
    "softmax": Kernel(
        softmax,
        softmax_reference,
        SOFTMAXES,
        resized(SOFTMAXES, *ROWS),
        _columns,
        specials=True,
    ),
    "rms_norm": Kernel(
        rms_norm,
        rms_norm_reference,
        RMS_NORMS,
        resized(RMS_NORMS, *ROWS),
        _columns,
        specials=True,
    ),
    "layer_norm": Kernel(
        layer_norm,
        layer_norm_reference,
        LAYER_NORMS,
        resized(LAYER_NORMS, *ROWS),
        _columns,
        specials=True,
    ),
    "adamw_step": Kernel(
        partial(stepped, adamw_step),
        partial(stepped, adamw_step_reference),
        WEIGHTS,
        resized(WEIGHTS, {"rows": 301, "columns": 1037}, {"rows": 1024, "columns": 2048, "narrow": True}),
        lambda *arrays: 1,
    ),
    "group_norm": Kernel(
        group_norm,
        group_norm_reference,
        GROUP_NORMS,
        (
            *resized(GROUP_NORMS, {"batch": 3, "side": 37, "channels": 130, "num_groups": 13}),
            replace(LARGE_GROUPS[0], name="parts", side=190),  # of more than 8 MiB: kernels of parts
        ),
        lambda x, *unused: x.size // x.shape[0],
        specials=True,
    ),
    "paged_attention": Kernel(
        paged_attention,
        paged_attention_reference,
        CACHES,
        resized(CACHES, {"sequences": 5, "keys": 1000, "page": 48}, {"sequences": 2, "keys": 1537, "window": 700}),
        lambda query, pages, lengths, table: query.shape[2] + table.shape[1] * pages.shape[1],
    ),
    "index_scores": Kernel(
        index_scores,
        index_scores_reference,
        INDEXERS,
        resized(INDEXERS, {"sequences": 5, "keys": 1000, "page": 48}, {"sequences": 2, "heads": 23, "keys": 1537}),
        lambda query, *unused: query.shape[1] * query.shape[2],
    ),
    "mla_attention": Kernel(
        mla_attention,
        mla_attention_reference,
        LATENTS,
        resized(LATENTS, {"sequences": 5, "keys": 1000, "page": 48}, {"sequences": 2, "heads": 23, "keys": 1537}),
        lambda query, pages, lengths, table: query.shape[2] + table.shape[1] * pages.shape[1],
    ),
    # The same tokens on every backend.
    "sample": Kernel(
        sample,
        partial(sample, target="cpu:xla"),
        LOGITS,
        resized(LOGITS, {"rows": 37, "words": 50257}),
        lambda logits, key: 1,
        dtyped=False,
    ),
    "sample_hidden": Kernel(
        sample_hidden,
        partial(sample_hidden, target="cpu:xla"),
        HIDDENS,
        (
            *resized(HIDDENS, {"rows": 37, "width": 333, "words": 20011}),
            replace(HIDDENS[2], name="top_k", rows=37, width=333, words=20011),
        ),
        lambda hidden, *unused: hidden.shape[1],
        dtyped=False,
    ),
    "swiglu": Kernel(
        swiglu,
        swiglu_reference,
        GATES,
        resized(GATES, *ROWS),
        lambda *arrays: 1,
        specials=True,
    ),
    "rope": Kernel(
        rope,
        rope_reference,
        ROTATIONS,
        resized(ROTATIONS, {"length": 301, "heads": 11}),
        lambda *arrays: 1,
        specials=True,
    ),
    "linear_attention": Kernel(
        linear_attention,
        linear_attention_reference,
        LINEAR_ATTENTIONS,
        resized(LINEAR_ATTENTIONS, *TOKENS),
        _tokens_and_depth,
    ),
    "gated_delta_rule": Kernel(
        gated_delta_rule,
        gated_delta_rule_reference,
        DELTA_RULES,
        resized(DELTA_RULES, *TOKENS),
        _tokens_and_depth,
    ),
    "rg_lru": Kernel(
        rg_lru,
        rg_lru_reference,
        GATED_UNITS,
        resized(GATED_UNITS, {"tokens": 301, "channels": 1037}, {"tokens": 512, "batch": 2}),
        lambda x, *unused: x.shape[1],
    ),
    "selective_scan": Kernel(
        selective_scan,
        selective_scan_reference,
        SELECTIVE_SCANS,
        resized(SELECTIVE_SCANS, {"tokens": 301, "channels": 1037, "states": 13}, {"tokens": 512, "batch": 2}),
        lambda x, delta, a, *unused: x.shape[1] + a.shape[1],
    ),
    "causal_conv1d": Kernel(
        causal_conv1d,
        causal_conv1d_reference,
        CONVOLUTIONS,
        resized(CONVOLUTIONS, {"tokens": 301, "channels": 1037}, {"taps": 2, "tokens": 67, "batch": 3}),
        lambda x, weight, *unused: weight.shape[0] + 1,
        specials=True,
    ),
}
