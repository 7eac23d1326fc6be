"""The forward kernel of flash attention and its blocks.

Online softmax (Milakov and Gimelshein 2018; FlashAttention-2, Dao 2023, algorithm 1): for each tile of keys, with
logits s, keep the running maximum m, the sum d = Σ exp(s - m) and the weighted values acc = Σ exp(s - m) v. When m
grows to m', both sums are scaled by exp(m - m'). In the end out = acc / d and logsumexp = m + ln d. Exponentials are
powers of 2, and logits may be without their scale: see `Scores`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.blocks import even, power_of_two, takes_registers, tiled
from tilekern.kernels.flash_attention.arguments import Config, Extras, Residuals
from tilekern.kernels.flash_attention.schedules import has_terms, of_map
from tilekern.kernels.flash_attention.scores import LN_2, of_queries, sink_logits


def _out_type(
    query: Any, key: Any, value: Any, extras: Extras, *, return_logsumexp: bool, return_residuals: bool
) -> tuple[Any, ...]:
    batch, queries, heads, _ = query.shape
    wide = tk.accumulator(query.dtype)
    out = jax.ShapeDtypeStruct((batch, queries, heads, value.shape[3]), query.dtype)
    row = jax.ShapeDtypeStruct((batch, queries, heads), wide)
    return out, row if return_logsumexp else None, Residuals(row, row) if return_residuals else None


@tk.kernel(out_type=_out_type)
def flash_attention_forward(
    query: tk.Ref,
    key: tk.Ref,
    value: tk.Ref,
    extras: Extras,
    out: tk.Ref,
    logsumexp: tk.Ref | None,
    residuals: Residuals | None,
    *,
    config: Config,
    return_logsumexp: bool,
    return_residuals: bool = False,
    block_q: tk.Block = 128,
    block_k: tk.Block = 128,
    block_n: tk.Block = 1,
) -> None:
    """query[B, T, N, H], key[B, S, K, H], value[B, S, K, Hv] -> out[B, T, N, Hv]; if asked for, logsumexp[B, T, N].

    With `return_residuals` also the `Residuals`, which the kernels of derivatives take.
    """
    scores, g, i = of_queries(config, extras, query, key, block_q, block_n)
    wide = scores.wide
    of_scores, of_values = config.precision

    q = scores.load_queries(query, i)

    def step(j: tk.Tile, attends: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        m, d, acc = carry
        s = scores.logits(i, j, scores.products(q, scores.load_keys(key, j, g), of_scores), attends)
        grown = jnp.maximum(m, s.max(axis=1))
        # A row that has seen no key yet: exp2(-inf - 0) = 0, where -inf - -inf would be NaN.
        base = jnp.where(grown == -jnp.inf, 0, grown)
        p = jnp.exp2((s - base[:, None]) * scores.factor)
        shrink = jnp.exp2((m - base) * scores.factor)
        d = d * shrink + p.sum(axis=1)
        weights = scores.drop_weights(i, j, p).astype(value.dtype)
        acc = tk.dot(weights, scores.load_keys(value, j, g), acc * shrink[:, None], precision=of_values)
        return grown, d, acc

    rows = q.shape[0]
    if extras.sinks is None:
        m, d = tk.full(rows, -jnp.inf, wide), tk.zeros(rows, wide)
    else:
        m = jnp.broadcast_to(sink_logits(config, extras, scores.of_heads(extras.sinks, i), wide), (rows,))
        d = jnp.where(m == -jnp.inf, wide.type(0), wide.type(1))
    m, d, acc = scores.over_keys(i, block_k, step, (m, d, tk.zeros((rows, value.shape[3]), wide)))
    total = jnp.where(d == 0, 1, d)
    scores.store_queries(out, i, (acc / total[:, None]).astype(out.dtype))
    if logsumexp is not None:
        largest = m * wide.type(abs(config.scale)) if scores.folds else m
        scores.store_queries(logsumexp, i, largest + jnp.log2(d) * wide.type(LN_2))
    if residuals is not None:
        scores.store_queries(residuals.largest, i, jnp.where(m == -jnp.inf, 0, m))
        scores.store_queries(residuals.log_sum, i, jnp.log2(total))


@flash_attention_forward.schedule("cpu")
@of_map
def _cpu(query: Any, key: Any, value: Any, extras: Extras) -> dict[str, int]:
    """Coarse tiles: XLA's matrix products are faster on them, and no register file limits them."""
    return {"block_q": even(query.shape[1], 256), "block_k": even(key.shape[1], 256), **_together(query, key, 128)}


def _together(query: Any, key: Any, rows: int) -> dict[str, int]:
    """The block of heads that share a head of the keys: as many as give a tile up to `rows` rows of queries.

    Each key is loaded once for all heads of the tile.
    """
    queries, group = query.shape[1], query.shape[2] // max(key.shape[2], 1)
    return {"block_n": even(group, max(1, rows // max(queries, 1)))}


@flash_attention_forward.schedule("cpu:llvm")
@of_map
def _llvm(query: Any, key: Any, value: Any, extras: Extras, config: Config) -> dict[str, int]:
    """Tiles of logits that stay in the second-level cache.

    The more queries, the less often keys and values are packed; but on the diagonal half of a tile is wasted.
    """
    narrow = query.dtype.itemsize == 2 and max(query.shape[3], value.shape[3]) <= 64
    block_q, block_k = (256, 256) if narrow else (256, 128) if config.causal else (512, 128)
    return {
        "block_q": even(query.shape[1], block_q),
        "block_k": even(key.shape[1], block_k),
        **_together(query, key, 128),
    }


# For float32 and float64: queries, keys, warps and stages, for rows of a head up to a number of bytes.
_WIDE_TILES = ((256, (64, 16, 8, 2)), (768, (32, 16, 4, 2)), (1024, (32, 16, 8, 2)))

# For 16-bit numbers: queries, keys, warps and stages, for heads up to a width. The accumulator, the logits and their
# exponentials have to fit the registers, keys and values of all stages the shared memory.
_TILES = {
    # 16 queries for a warp, whose operands are in registers, too; narrow heads leave room for three programs.
    "mma": ((64, (64, 64, 4, 3)), (192, (128, 64, 8, 2)), (256, (64, 64, 8, 2)), (512, (32, 32, 8, 2))),
    # Four warps multiply 64 queries. Narrow heads leave room for two programs on a multiprocessor: while one computes
    # exponentials, which take as long as its products, the second one multiplies.
    "wgmma": ((64, (128, 64, 8, 3)), (192, (128, 128, 8, 2)), (256, (128, 64, 8, 2)), (512, (64, 32, 8, 2))),
    "mfma": ((192, (128, 64, 8, 2)), (256, (64, 64, 8, 2)), (512, (32, 32, 8, 2))),
    # 128 keys of narrow heads would spill: with tensor memory for two programs, a thread has 128 registers.
    "tcgen05": ((64, (128, 64, 8, 3)), (192, (128, 128, 8, 2)), (256, (128, 64, 8, 2)), (512, (64, 32, 8, 2))),
}


@flash_attention_forward.schedule("cuda")
@of_map
def _cuda(query: Any, key: Any, value: Any, extras: Extras, config: Config, device: tk.Device) -> dict[str, int]:
    """Tiles by the width of a head; smaller tiles where there are few queries."""
    batch, queries, heads, _ = query.shape
    width = max(query.shape[3], value.shape[3])
    if device.emitter == "gluon":
        # For each of two warpgroups, which share keys and values. The sums of wide heads leave no room for more keys.
        return {"block_q": 64, "block_k": 128 if width <= 128 else 64, "num_warps": 8}
    if query.dtype.itemsize > 2:
        # No tensor cores: operands and sums are all in registers.
        tile = next((tile for limit, tile in _WIDE_TILES if width * query.dtype.itemsize <= limit), (16, 16, 8, 1))
        return _blocks(power_of_two(queries, tile[0], 16), *tile[1:])
    if queries <= 32:
        # Loading keys and values takes the time: three stages of loads are in flight.
        block_q, block_k = power_of_two(queries, 32, 16), power_of_two(8192 // max(width, 1), 64, 16)
        return _few_queries(query, value, device, block_q, block_k)
    tiles = _TILES[device.matrix_unit]
    block_q, block_k, num_warps, num_stages = next((tile for limit, tile in tiles if width <= limit), tiles[-1][1])
    if device.matrix_unit == "wgmma" and width <= 128 and has_terms(extras):
        # Terms are loaded for each score. Beside the scores of a large tile they would spill, or not fit the shared
        # memory; of small tiles several programs share a multiprocessor, and some load while others multiply.
        block_q, block_k, num_warps, num_stages = 64, 64, 4, 3
    if config.dropout_rate:
        block_k = min(block_k, 64)  # the bits of a larger tile would not fit the registers, too
    held = block_q * query.shape[3] + num_stages * block_k * (query.shape[3] + value.shape[3])
    if held * query.dtype.itemsize >= device.fast_memory:
        block_k //= 2  # queries, and keys and values of all stages, have to fit the shared memory
    programs = batch * heads * tk.cdiv(queries, block_q)
    if block_q == 128 and (queries <= 64 or programs < device.cores):
        block_q, num_warps = 64, 4  # so that more multiprocessors have work
    return _blocks(block_q, block_k, num_warps, num_stages)


def _few_queries(query: Any, value: Any, device: tk.Device, block_q: int, block_k: int) -> dict[str, int]:
    """At most `block_k` keys in three stages, and less where these would not fit the shared memory.

    Widths are padded to powers of two. Where products take operands from registers, one stage is in registers. Queries
    and scores go through shared memory beside the remaining stages: the sum equals the compiler's report for CUDA to
    the byte. AMD's compiler gives queries and scores no place of their own.
    """
    widths, registers = [power_of_two(n, 1 << 16) for n in (query.shape[3], value.shape[3])], takes_registers(device)

    def fits(stages: int) -> bool:
        staged = 0 if device.matrix_unit == "mfma" else block_q * (widths[0] + block_k)
        elements = staged + max(1, stages - registers) * block_k * sum(widths)
        return elements * query.dtype.itemsize <= device.fast_memory

    while block_k > 16 and not fits(3):
        block_k //= 2
    return _blocks(block_q, block_k, 4, next((n for n in (3, 2) if fits(n)), 1))


def _blocks(block_q: int, block_k: int, num_warps: int, num_stages: int) -> dict[str, int]:
    return {"block_q": block_q, "block_k": block_k, "num_warps": num_warps, "num_stages": num_stages}


@flash_attention_forward.schedule("tpu")
@of_map
def _tpu(query: Any, key: Any, value: Any, extras: Extras, config: Config, target: str) -> dict[str, int]:
    """Best by the static estimate, for 1024 and 4096 queries and heads of 64 to 256: of 256 to 2048 queries and keys.

    The larger a tile, the fewer loads, reductions and rescalings for a logit; but on the diagonal half of it is wasted.
    With two tiles of keys or more, matrix units work on one while vector units work on another. Up to 128 queries the
    time is that of loading keys into the matrix units: heads side by side share it, and tiles of many keys hide the
    work after each tile. Beyond, heads side by side gain less than a larger tile does.
    """
    queries, keys, itemsize = query.shape[1], key.shape[1], query.dtype.itemsize
    slow = target in ("tpu:v5e", "tpu:v5p") or itemsize > 2
    limit = 512 if slow else 1024
    if queries <= 128:
        heads = _together(query, key, 512)
        least, scores = (512, 1 << 17) if itemsize > 2 else (1024, 1 << 18)
        most = (4 << 20) // max(1, (query.shape[3] + value.shape[3]) * itemsize)  # 4 MiB of keys and values
        block_k = min(max(least, scores // max(1, queries * heads["block_n"])), 4096, max(128, most))
        return {"block_q": max(1, queries), "block_k": tiled(keys, block_k, 128), **heads}
    block_q = tiled(queries, 2 * limit if slow and not config.causal else limit, 8)
    block_k = tiled(keys, limit if config.causal or keys > limit else 512, 128)
    return {"block_q": block_q, "block_k": block_k}
