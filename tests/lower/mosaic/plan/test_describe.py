"""The text of a plan."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.flash_attention.arguments import Config, Extras
from tilekern.kernels.flash_attention.kernel import flash_attention_forward
from tilekern.kernels.ragged_dot.kernel import ragged_dot_forward


def like(*shape: int, dtype: object = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def line(plan: str, start: str) -> str:
    """The first line of a plan that starts so."""
    return next(text for text in map(str.strip, plan.splitlines()) if text.startswith(start))


def test_attention_keeps_its_keys_in_vmem() -> None:
    query = like(1, 1000, 8, 128)
    plan = (
        flash_attention_forward.trace(
            query,
            query,
            query,
            Extras(),
            config=Config(scale=0.1, causal=True),
            return_logsumexp=True,
            block_q=512,
            block_k=512,
        )
        .lower("tpu:v6e")
        .plan
    )
    assert "inside of the kernel, 2 tiles at once: all that it reads is in VMEM" in line(plan, "scores.py")
    assert "blocked [512, 128]" in line(plan, "query")
    assert "all, read in tiles of 512" in line(plan, "key")
    # Per-head blocks of [B, T, N, H] are blocks of [B, T, N * H]; its own reshape is not charged for.
    assert "a reshape by XLA to [1, 1000, 1024]" in line(plan, "query")
    # logsumexp[b, n, i] has its tile last only when XLA has moved it there: 1000 * 8 floats, read and written.
    assert "rearranges it to [1, 8, 1, 1000] around the call: 64000 B" in line(plan, "logsumexp")
    # Logits of float32, and what multiplies the values, of bfloat16, of two tiles at once; the mask of a ragged tile.
    assert line(plan, "values") == "values: 3072 KiB"


def test_what_does_not_fit_comes_by_a_pipeline() -> None:
    plan = (
        ragged_dot_forward.trace(
            like(8000, 2048),
            like(128, 2048, 768),
            like(128, dtype=jnp.int32),
            block_m=128,
            block_n=128,
            block_k=64,
            owned="rows",
        )
        .lower("tpu:v5e")
        .plan
    )
    assert "a pipeline inside of the kernel" in line(plan, "kernel.py")
    assert "in HBM, blocks [2048, 128]" in line(plan, "rhs")
    assert "prefetched into scalar memory, 512 B" in line(plan, "ends")
    assert "computed ahead by XLA" in plan


def test_users_lines_are_named() -> None:
    @tk.kernel(out_type=lambda x: x)
    def double(x: tk.Ref, out: tk.Ref) -> None:
        i = tk.parallel(x.shape[0], 16)
        out[i] = x[i] * 2

    plan = double.trace(like(64, 256)).lower("tpu:v5e").plan
    assert plan.startswith("double on tpu:v5e: 0.03 MiB of")
    assert "test_describe.py" in line(plan, "x[64, 256] (in")
    assert line(plan, "i:") == "i: 4 steps, parallel"
