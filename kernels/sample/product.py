"""Logits that are a product, hidden @ weight, of which only tiles exist."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

import tilekern as tk
from tilekern.kernels.softcap import softcapped


class Operands(NamedTuple):
    """The operands of the logits softcap tanh((hidden @ weight + bias) / softcap).

    Attributes:
      hidden: float [B, D].
      weight: of the same dtype, [D, V]; or [V, D], as an embedding has it.
      bias: float [V], or None.
    """

    hidden: Any
    weight: Any
    bias: Any = None


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
        return weight.shape[not self.transpose_weight]


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
        (hidden, weight, bias), is_tile = self.operands, isinstance(rows, tk.Tile)

        def step(k: tk.Tile, acc: jax.Array) -> jax.Array:
            x = hidden[rows, k]
            w = weight[j, k].T if self.form.transpose_weight else weight[k, j]
            return tk.dot(x if is_tile else x[None, :], w, acc)

        start = tk.zeros((rows if is_tile else 1, j), tk.accumulator(hidden.dtype))
        logits = tk.fold(tk.serial(hidden.shape[1], self.block_d), step, start)
        logits = logits if bias is None else logits + bias[j].astype(logits.dtype)[None, :]
        logits = softcapped(logits, self.form.softcap)
        return logits if is_tile else logits.reshape(j.size)
