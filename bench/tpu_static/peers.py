"""The peers: JAX's splash and flash attention for TPU, and what XLA makes of plain `jnp`, with the blocks to try."""

from __future__ import annotations

from collections.abc import Mapping

from bench.tpu_static.cases import HEADS, Case

# (query, key, key of one step). The peers' default of 128 is left out: it takes 8 to 15 times as long.
FLASH_BLOCKS = ((512, 512, 512), (512, 1024, 512), (1024, 1024, 512), (1024, 1024, 1024))
SPLASH_BLOCKS = (*FLASH_BLOCKS, (2048, 1024, 1024))


def peers(case: Case) -> Mapping[str, str]:
    """The programs to compare with, by "peer blocks"; of each peer the fastest counts."""
    if case.kernel != "attention":
        return {"xla": _xla(case)}
    splash = {f"splash {_name(b)}": _splash(case, b) for b in SPLASH_BLOCKS if max(b) <= case.size}
    return splash | {f"flash {_name(b)}": _flash(case, b) for b in FLASH_BLOCKS if max(b) <= case.size}


def _name(blocks: tuple[int, int, int]) -> str:
    return "/".join(map(str, blocks))


def _splash(case: Case, blocks: tuple[int, int, int]) -> str:
    """Layout [head, sequence, head_dim]. `downcast_smem_data`: its tables stay words, which the simulation reads."""
    s, mask = case.size, "CausalMask" if case.causal else "FullMask"
    q, kv, compute = blocks
    return f"""
import jax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
fn = kernel.make_splash_mha(
    masks.MultiHeadMask([masks.{mask}(({s}, {s}))] * {HEADS}),
    block_sizes=kernel.BlockSizes(block_q={q}, block_kv={kv}, block_kv_compute={compute}),
    head_shards=1, q_seq_shards=1, downcast_smem_data=False,
)
args = [jax.ShapeDtypeStruct(({HEADS}, {s}, {case.head_dim}), "bfloat16")] * 3
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
