"""Logits that are a product, hidden @ weight, of which only tiles exist."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import tilekern as tk
from tilekern.kernels.ragged_dot import products as scaled
from tilekern.kernels.softcap import softcapped


class Operands(NamedTuple):
    """The operands of the logits softcap tanh((hidden @ weight + bias) / softcap).

    Attributes:
      hidden: float [B, D].
      weight: of the same dtype, [D, V]; or [V, D], as an embedding has it. With a scale of 8 or 4 bits, [1, D, V] or
        [1, V, D].
      bias: float [V], or None.
      scale: float32[1, blocks of D, V or 1], what weights are multiplied by, also of [1, V, D]; or None.
      first: int32[1], the number of the weight's first token in a vocabulary that devices divide; None for 0.
      stop: int32[1], the number of tokens before padding; logits of padding are -inf. None for V.
    """

    hidden: Any
    weight: Any
    bias: Any = None
    scale: Any = None
    first: Any = None
    stop: Any = None


class Form(NamedTuple):
    """How the operands become logits: the static arguments of the kernels.

    Attributes:
      softcap: c of c tanh(logits / c), or None.
      transpose_weight: True if weight is [V, D].
    """

    softcap: float | None = None
    transpose_weight: bool = False

    def words(self, weight: Any) -> int:
        """V."""
        return weight.shape[-2 if self.transpose_weight else -1]


@dataclass(frozen=True)
class Product:
    """Logits that are indexed as a ref of [B, V] is, by (row or tile of rows, tile of tokens).

    Attributes:
      operands: refs.
      form: the static arguments.
      block_d: elements of the inner dim in a tile.
    """

    operands: Operands
    form: Form
    block_d: int

    @property
    def shape(self) -> tuple[int, int]:
        """(B, V)."""
        return self.operands.hidden.shape[0], self.form.words(self.operands.weight)

    def __getitem__(self, place: tuple[Any, tk.Tile]) -> jax.Array:
        """The logits of a place in the accumulator's dtype: [block_b, block_v], or [block_v] of one row."""
        rows, j = place
        bias, is_tile = self.operands.bias, isinstance(rows, tk.Tile)
        logits = self._sums(rows, j) if self.operands.scale is None else self._scaled_sums(rows, j)
        logits = logits if bias is None else logits + bias[j].astype(logits.dtype)[None, :]
        logits = softcapped(logits, self.form.softcap)
        if self.operands.stop is not None:
            logits = jnp.where(j.indices[None, :] < self.operands.stop[0], logits, -jnp.inf)
        return logits if is_tile else logits.reshape(j.size)

    def numbers(self, j: tk.Tile) -> jax.Array:
        """int32[block_v]: the numbers of the tokens of a tile in the whole vocabulary."""
        return j.indices if self.operands.first is None else j.indices + self.operands.first[0]

    def _sums(self, rows: Any, j: tk.Tile) -> jax.Array:
        """hidden @ weight, of one row [1, block_v]."""
        (hidden, weight, *_), is_tile = self.operands, isinstance(rows, tk.Tile)

        def step(k: tk.Tile, acc: jax.Array) -> jax.Array:
            x = hidden[rows, k]
            w = weight[j, k].T if self.form.transpose_weight else weight[k, j]
            return tk.dot(x if is_tile else x[None, :], w, acc)

        start = tk.zeros((rows if is_tile else 1, j), tk.accumulator(hidden.dtype))
        return tk.fold(tk.serial(hidden.shape[1], self.block_d), step, start)

    def _scaled_sums(self, rows: Any, j: tk.Tile) -> jax.Array:
        """`_sums` of a weight with scales, as `quantized_matmul` computes them."""
        hidden, weight, _, scale, *_ = self.operands
        i = rows if isinstance(rows, tk.Tile) else tk.tile(hidden.shape[0], 1, rows)
        operands = scaled.Operands(hidden, (weight,), None, (scale,), self.form.transpose_weight)
        only: Any = 0
        (sums,) = scaled.products(operands, i, j, only, None, self.block_d)
        return sums
