"""The peers: JAX's splash and flash attention for TPU, and plain `jnp` compiled by XLA, with the blocks to try."""

from __future__ import annotations

from collections.abc import Mapping

from bench.tpu_static.cases import HEADS, Case, decode, of_projections

# (query, key, key of one step). The peers' default of 128 is left out: it takes 8 to 15 times as long.
FLASH_BLOCKS = ((512, 512, 512), (512, 1024, 512), (1024, 1024, 512), (1024, 1024, 1024))
SPLASH_BLOCKS = (*FLASH_BLOCKS, (2048, 1024, 1024))
BACKWARD_BLOCKS = ((512, 512, 512), (1024, 1024, 512), (1024, 1024, 1024), (2048, 1024, 1024), (1024, 2048, 1024))


def peers(case: Case) -> Mapping[str, str]:
    """The programs of peers, by "peer blocks"; of each peer the fastest counts."""
    if case.kernel == "backward":
        fitting = [b for b in BACKWARD_BLOCKS if max(b) <= case.size]
        kinds = (("splash", False), ("splash-fused", True))
        return {f"{name} {_name(b)}": _splash_backward(case, b, fused) for name, fused in kinds for b in fitting}
    if case.kernel != "attention":
        return {"xla": _xla(case)}
    splash = {f"splash {_name(b)}": _splash(case, b) for b in SPLASH_BLOCKS if max(b) <= case.size}
    if case.projected:
        return splash
    return splash | {f"flash {_name(b)}": _flash(case, b) for b in FLASH_BLOCKS if max(b) <= case.size}


def _name(blocks: tuple[int, int, int]) -> str:
    return "/".join(map(str, blocks))


def _splash(case: Case, blocks: tuple[int, int, int]) -> str:
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
        return of_projections(case, setup, "splash(q, k, v)", f"({s}, {HEADS}, {case.head_dim})", transposed=True)
    return f"""{setup}
args = [jax.ShapeDtypeStruct(({HEADS}, {s}, {case.head_dim}), "bfloat16")] * 3
"""


def _splash_backward(case: Case, blocks: tuple[int, int, int], fused: bool) -> str:
    """The backward pass alone, with one kernel for query and one for key and value, or one kernel for all (`fused`).

    JAX has no public name for it: `jax.vjp` of the whole would run the forward kernel, too.
    """
    s, mask = case.size, "CausalMask" if case.causal else "FullMask"
    q, kv, compute = blocks
    of_query = "use_fused_bwd_kernel=True" if fused else f"block_q_dq={q}, block_kv_dq={kv}"
    return f"""
import jax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
made = kernel.make_splash_mha(
    masks.MultiHeadMask([masks.{mask}(({s}, {s}))] * {HEADS}),
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


def _flash(case: Case, blocks: tuple[int, int, int]) -> str:
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


def _xla(case: Case) -> str:
    if case.kernel == "decode":
        return decode(case, "", "jax.nn.dot_product_attention")
    n = case.size
    formulas = {
        "matmul": ("x, w: jnp.matmul(x, w)", [((n, n), "bfloat16")] * 2),
        "softmax": ("x: jax.nn.softmax(x)", [((n, n), "float32")]),
        "rms_norm": (
            "x, w: x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * w",
            [((n, n), "float32"), ((n,), "float32")],
        ),
    }
    formula, shapes = formulas[case.kernel]
    return (
        "import jax, jax.numpy as jnp\n"
        f"fn = lambda {formula}\n"
        f"args = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in {shapes!r}]\n"
    )
