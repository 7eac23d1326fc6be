"""Attention, its backward pass and decoding, beside JAX's splash and flash attention and XLA."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bench.tpu_static.cases.case import Case

HEADS = 8

# Queries, keys, and keys of one step.
Blocks = tuple[int, int, int]

# The peers' default of 128 is left out: it takes 8 to 15 times as long.
FLASH_BLOCKS = ((512, 512, 512), (512, 1024, 512), (1024, 1024, 512), (1024, 1024, 1024))
SPLASH_BLOCKS = (*FLASH_BLOCKS, (2048, 1024, 1024))
BACKWARD_BLOCKS = ((512, 512, 512), (1024, 1024, 512), (1024, 1024, 1024), (2048, 1024, 1024), (1024, 2048, 1024))


@dataclass(frozen=True)
class Attention(Case):
    """Attention of `HEADS` heads over one sequence.

    Attributes:
      size: the length of the sequence.
      head_dim: the width of queries, keys and values.
      causal: True if queries see only the keys up to their own position.
      projected: True if all contestants take and return [sequence, heads · head_dim], as projections return and take;
        else each takes its favourite layout.
    """

    size: int
    head_dim: int
    causal: bool = False
    projected: bool = False

    @property
    def name(self) -> str:
        """The sizes and the kind."""
        kind = ("causal" if self.causal else "full") + (" projected" if self.projected else "")
        return f"attention s{self.size} d{self.head_dim} {kind}"

    @property
    def flops(self) -> int:
        """Two products over the pairs of queries and keys."""
        return 2 * 2 * HEADS * self.head_dim * _pairs(self.size, self.causal)

    @property
    def nbytes(self) -> int:
        """Query, key, value and the result."""
        return 4 * self.size * HEADS * self.head_dim * 2

    def ours(self, chip: str) -> str:
        """Layout [batch, sequence, head, head_dim], unless projected."""
        setup = "from tilekern.kernels.flash_attention import flash_attention"
        call = f"flash_attention(q, k, v, causal={self.causal}, target='tpu:{chip}')"
        shape = f"(1, {self.size}, {HEADS}, {self.head_dim})"
        if self.projected:
            return _of_projections(self, setup, call, shape)
        return f"""
import jax
{setup}
fn = lambda q, k, v: {call}
args = [jax.ShapeDtypeStruct({shape}, "bfloat16")] * 3
"""

    def peers(self) -> Mapping[str, str]:
        """Splash attention and, unless projected, flash attention."""
        splash = {f"splash {_name(b)}": _splash(self, b) for b in SPLASH_BLOCKS if max(b) <= self.size}
        if self.projected:
            return splash
        return splash | {f"flash {_name(b)}": _flash(self, b) for b in FLASH_BLOCKS if max(b) <= self.size}


@dataclass(frozen=True)
class Backward(Case):
    """The whole backward pass of causal attention, from the results of the forward pass and a cotangent."""

    size: int
    head_dim: int

    @property
    def name(self) -> str:
        """The sizes."""
        return f"backward s{self.size} d{self.head_dim} causal"

    @property
    def flops(self) -> int:
        """Five products over the pairs of queries and keys."""
        return 2 * 5 * HEADS * self.head_dim * _pairs(self.size, causal=True)

    @property
    def nbytes(self) -> int:
        """Eight arrays like the query, and the logsumexp."""
        return self.size * HEADS * (8 * self.head_dim * 2 + 4)

    def ours(self, chip: str) -> str:
        """The op of the backward pass."""
        return _backward(self, chip)

    def peers(self) -> Mapping[str, str]:
        """The backward passes of splash attention, in two kernels and in one."""
        fitting = [b for b in BACKWARD_BLOCKS if max(b) <= self.size]
        kinds = (("splash", False), ("splash-fused", True))
        return {f"{name} {_name(b)}": _splash_backward(self, b, fused) for name, fused in kinds for b in fitting}


@dataclass(frozen=True)
class Decode(Case):
    """Attention of one query of `HEADS` heads, which share two heads of keys and values, for a batch of four."""

    size: int
    head_dim: int

    @property
    def name(self) -> str:
        """The sizes."""
        return f"decode s{self.size} d{self.head_dim} full"

    @property
    def flops(self) -> int:
        """Two products of each query with all keys."""
        return 4 * 2 * 2 * HEADS * self.head_dim * self.size

    @property
    def nbytes(self) -> int:
        """Queries and results, keys and values."""
        return 4 * (2 * HEADS + 4 * self.size) * self.head_dim * 2

    def ours(self, chip: str) -> str:
        """Keys and values are kept as [batch, sequence, heads · head_dim]."""
        setup = "from functools import partial\nfrom tilekern.kernels.flash_attention import flash_attention"
        return _decode(self, setup, f"partial(flash_attention, target='tpu:{chip}')")

    def peers(self) -> Mapping[str, str]:
        """JAX's own attention, by XLA."""
        return {"xla": _decode(self, "", "jax.nn.dot_product_attention")}


CASES: tuple[Case, ...] = (
    *(Attention(s, d, causal) for s in (1024, 4096, 16384) for d in (64, 128, 256) for causal in (True, False)),
    Attention(4096, 128, causal=True, projected=True),
    *(Backward(4096, d) for d in (64, 128)),
    Decode(8192, 128),
)

SMALL: tuple[Case, ...] = (
    Attention(2048, 128, causal=True),
    Attention(2048, 128),
    Attention(2048, 64, causal=True),
    Backward(1024, 128),
    Decode(4096, 128),
)


def _pairs(size: int, causal: bool) -> int:
    return size * (size + 1) // 2 if causal else size**2


# --- our programs -----------------------------------------------------------------------------------------------------


def _of_projections(case: Attention, setup: str, call: str, shape: str, transposed: bool = False) -> str:
    """The program of attention on arrays [sequence, heads · head_dim].

    Args:
      case: the case.
      setup: source to run before, such as imports.
      call: source of attention on q, k and v.
      shape: the shape of its arrays, as [sequence, heads, head_dim] before a transposition.
      transposed: True if its arrays are [heads, sequence, head_dim].
    """
    turn = ".transpose(1, 0, 2)" if transposed else ""
    flat = f"({case.size}, {HEADS * case.head_dim})"
    return f"""
import jax
{setup}
def fn(q, k, v):
    q, k, v = (x.reshape({shape}){turn} for x in (q, k, v))
    return ({call}){turn}.reshape({flat})
args = [jax.ShapeDtypeStruct({flat}, "bfloat16")] * 3
"""


def _decode(case: Decode, setup: str, attention: str) -> str:
    """The program of `attention(q, k, v)` on keys and values that are kept as [batch, sequence, heads · head_dim]."""
    cache_shape = f"(4, {case.size}, 2, {case.head_dim})"
    return f"""
import jax
{setup}
fn = lambda q, k, v: {attention}(q, k.reshape{cache_shape}, v.reshape{cache_shape})
cache = jax.ShapeDtypeStruct((4, {case.size}, {2 * case.head_dim}), "bfloat16")
args = [jax.ShapeDtypeStruct((4, 1, {HEADS}, {case.head_dim}), "bfloat16"), cache, cache]
"""


def _backward(case: Backward, chip: str) -> str:
    """The program of the backward pass: cotangents of query, key and value from the cotangent of out."""
    wide, rows = (1, case.size, HEADS, case.head_dim), (1, case.size, HEADS)
    return f"""
import jax
from tilekern.kernels.flash_attention.arguments import Config, Extras, Residuals, Tangents
from tilekern.kernels.flash_attention.derivatives import flash_attention_backward
config = Config(scale={case.head_dim**-0.5}, causal=True)
def fn(q, k, v, out, largest, log_sum, cotangent):
    (found,) = flash_attention_backward(
        q, k, v, Extras(), out, Residuals(largest, log_sum), (cotangent, None),
        config=config, needs=Tangents(True, True, True), target="tpu:{chip}",
    )
    return found[:3]
wide = jax.ShapeDtypeStruct({wide}, "bfloat16")
args = [wide] * 4 + [jax.ShapeDtypeStruct({rows}, "float32")] * 2 + [wide]
"""


# --- programs of peers ------------------------------------------------------------------------------------------------


def _name(blocks: Blocks) -> str:
    return "/".join(map(str, blocks))


def _splash(case: Attention, blocks: Blocks) -> str:
    """Layout [head, sequence, head_dim], unless projected.

    `downcast_smem_data`: its tables stay words, which the simulation reads.
    """
    s, mask = case.size, "CausalMask" if case.causal else "FullMask"
    q, kv, compute = blocks
    setup = f"""
import jax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
fn = splash = kernel.make_splash_mha(
    masks.MultiHeadMask([masks.{mask}(({s}, {s}))] * {HEADS}),
    block_sizes=kernel.BlockSizes(block_q={q}, block_kv={kv}, block_kv_compute={compute}),
    head_shards=1, q_seq_shards=1, downcast_smem_data=False,
)
"""
    if case.projected:
        return _of_projections(case, setup, "splash(q, k, v)", f"({s}, {HEADS}, {case.head_dim})", transposed=True)
    return f"""{setup}
args = [jax.ShapeDtypeStruct(({HEADS}, {s}, {case.head_dim}), "bfloat16")] * 3
"""


def _splash_backward(case: Backward, blocks: Blocks, fused: bool) -> str:
    """The backward pass alone, with one kernel for query and one for key and value, or one kernel for all (`fused`).

    JAX has no public name for it: `jax.vjp` of the whole would run the forward kernel, too.
    """
    s, (q, kv, compute) = case.size, blocks
    of_query = "use_fused_bwd_kernel=True" if fused else f"block_q_dq={q}, block_kv_dq={kv}"
    return f"""
import jax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
made = kernel.make_splash_mha(
    masks.MultiHeadMask([masks.CausalMask(({s}, {s}))] * {HEADS}),
    block_sizes=kernel.BlockSizes(
        block_q={q}, block_kv={kv}, block_q_dkv={q}, block_kv_dkv={kv}, block_kv_dkv_compute={compute}, {of_query}
    ),
    head_shards=1, q_seq_shards=1, downcast_smem_data=False,
)
static = (
    "save_residuals", "mask_value", "is_mqa", "block_sizes", "residual_checkpoint_name", "mask_function",
    "attn_logits_soft_cap", "interpret",
)
def fn(q, k, v, out, logsumexp, cotangent):
    residuals = q, k, v, None, None, out, logsumexp, made.dq_mask_info, made.dkv_mask_info
    return kernel._splash_attention_bwd(*map(made.kwargs.get, static), residuals, cotangent)[3:6]
wide = jax.ShapeDtypeStruct(({HEADS}, {s}, {case.head_dim}), "bfloat16")
args = [wide] * 4 + [jax.ShapeDtypeStruct(({HEADS}, {s}), "float32"), wide]
"""


def _flash(case: Attention, blocks: Blocks) -> str:
    """Layout [batch, head, sequence, head_dim]."""
    q, major, k = blocks
    return f"""
import jax
from jax.experimental.pallas.ops.tpu import flash_attention as flash
blocks = flash.BlockSizes(block_q={q}, block_k_major={major}, block_k={k}, block_b=1)
fn = lambda q, k, v: flash.flash_attention(
    q, k, v, causal={case.causal}, sm_scale={case.head_dim**-0.5}, block_sizes=blocks
)
args = [jax.ShapeDtypeStruct((1, {HEADS}, {case.size}, {case.head_dim}), "bfloat16")] * 3
"""
