"""The loop of chunked recurrences: programs, chunks of tokens, and the state that one chunk gives to the next.

A kernel of a recurrence has a step, and `over_chunks` or `over_chunks_of_stacks` run it for each chunk of tokens. A
step reads the tokens of its `Chunk`, stores their outputs, and returns the state after the chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import tilekern as tk

_STATES = 32 * 128 * 128
"""The most elements of the states of a program: with as many, the steps of 64 tokens take 14 MiB of vector memory."""


class Arrays(NamedTuple):
    """The arrays of a recurrence, refs in a kernel.

    Attributes:
      query: [B, T, G, K]; head h reads the query and the key of group h // (H // G).
      key: [B, T, G, K].
      value: [B, T, H, V].
      initial_state: [B, H, K, V]; None for zeros.
      out: [B, T, H, V].
      final_state: [B, H, K, V].
    """

    query: Any
    key: Any
    value: Any
    initial_state: Any
    out: Any
    final_state: Any

    @property
    def shared(self) -> int:
        """The number of heads of a group."""
        return self.value.shape[2] // self.query.shape[2]

    @property
    def wide(self) -> Any:
        """The dtype of states: float32, or float64 for float64."""
        return tk.accumulator(self.value.dtype)


@dataclass(frozen=True)
class Chunk:
    """C tokens of one head.

    Attributes:
      arrays: the refs.
      b: the number of the sequence.
      g: the group of the head.
      h: the number of the head.
      j: a tile of the columns of values and states.
      t: the tile of tokens.
    """

    arrays: Arrays
    b: Any
    g: Any
    h: Any
    j: tk.Tile
    t: tk.Tile

    @property
    def query(self) -> jax.Array:
        """The queries of the tokens, [C, K]."""
        return self.arrays.query[self.b, self.t, self.g]

    @property
    def key(self) -> jax.Array:
        """The keys of the tokens, [C, K]."""
        return self.arrays.key[self.b, self.t, self.g]

    @property
    def value(self) -> jax.Array:
        """The values of the tokens, [C, block_v]."""
        return self.arrays.value[self.b, self.t, self.h, self.j]

    def of_tokens(self, array: tk.Ref) -> jax.Array:
        """The entries of array[B, T, H, ...] for the tokens of the head, [C, ...] in the dtype of states."""
        return array[self.b, self.t, self.h].astype(self.arrays.wide)

    def store(self, outputs: jax.Array) -> None:
        """Store the outputs [C, V] of the tokens."""
        self.arrays.out[self.b, self.t, self.h, self.j] = outputs.astype(self.arrays.out.dtype)


class StackChunk(Chunk):
    """C tokens of a stack of heads: g is a tile of groups, and h the tile of all of their heads."""

    def stacks(self) -> tuple[jax.Array, ...]:
        """Queries [groups, C, K], keys [groups, C, K] and values [heads, C, V] in the dtype of states."""
        return tuple(jnp.swapaxes(x.astype(self.arrays.wide), 0, 1) for x in (self.query, self.key, self.value))

    def of_tokens(self, array: tk.Ref) -> jax.Array:
        """The entries of array[B, T, H, ...] for the tokens of each head, [heads, C, ...] in the dtype of states."""
        return jnp.swapaxes(super().of_tokens(array), 0, 1)

    def store(self, outputs: jax.Array) -> None:
        """Store the outputs [heads, C, V] of the tokens."""
        super().store(jnp.swapaxes(outputs, 0, 1))

    def products(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """The products of two stacks in the dtype of states, with operands rounded to the dtype of the values."""
        return tk.dot(x, y, precision="bf16" if self.is_narrow else None)

    def repeated(self, x: jax.Array) -> jax.Array:
        """A matrix for each head, from a matrix for each group."""
        return jnp.repeat(x, self.arrays.shared, axis=0) if self.arrays.shared > 1 else x

    @property
    def is_narrow(self) -> bool:
        """True if the values are bfloat16."""
        return self.arrays.value.dtype == jnp.bfloat16


def out_types(query: Any, value: Any) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """The types of `Arrays.out`, like the value, and of `Arrays.final_state`, in float32 (float64 for float64)."""
    batch, _, heads, width = value.shape
    state = jax.ShapeDtypeStruct((batch, heads, query.shape[3], width), tk.accumulator(value.dtype))
    return jax.ShapeDtypeStruct(value.shape, value.dtype), state


def over_chunks(arrays: Arrays, step: Callable[[Chunk, jax.Array], jax.Array], *, block_t: int, block_v: int) -> None:
    """The body of a kernel whose programs have one head. `step` takes and returns its state, [K, block_v]."""
    groups, shared = arrays.query.shape[2], arrays.shared
    b = tk.parallel(arrays.value.shape[0])
    g = tk.parallel(groups)
    n = tk.parallel(shared)
    j = tk.parallel(arrays.value.shape[3], block_v)
    h = n if groups == 1 else g * shared + n

    def chunk(t: tk.Tile, state: jax.Array) -> jax.Array:
        return step(Chunk(arrays, b, g, h, j, t), state)

    _fold(arrays, chunk, b, h, j, (), block_t)


def over_chunks_of_stacks(
    arrays: Arrays, step: Callable[[StackChunk, jax.Array], jax.Array], *, block_t: int, block_v: int, heads: int
) -> None:
    """The body of a kernel whose programs have `heads` heads. `step` takes and returns states, [heads, K, block_v]."""
    b = tk.parallel(arrays.value.shape[0])
    g = tk.parallel(arrays.query.shape[2], heads // arrays.shared)
    j = tk.parallel(arrays.value.shape[3], block_v)
    h = g * arrays.shared

    def chunk(t: tk.Tile, states: jax.Array) -> jax.Array:
        return step(StackChunk(arrays, b, g, h, j, t), states)

    _fold(arrays, chunk, b, h, j, (heads,), block_t)


def _fold(
    arrays: Arrays, chunk: Callable[..., jax.Array], b: Any, h: Any, j: tk.Tile, lead: tuple[int, ...], block_t: int
) -> None:
    """Run `state = chunk(t, state)` for each tile t of block_t tokens; store the last state to final_state[b, h, :, j].

    The first state is initial_state[b, h, :, j], or zeros [*lead, K, block_v].
    """
    depth, tokens, initial = arrays.key.shape[3], arrays.value.shape[1], arrays.initial_state
    start = tk.zeros((*lead, depth, j), arrays.wide) if initial is None else initial[b, h, :, j].astype(arrays.wide)
    arrays.final_state[b, h, :, j] = tk.fold(tk.serial(tokens, block_t), chunk, start)


def heads_of_program(groups: int, heads: int, state: int) -> int:
    """The largest number of heads of whole groups that divides `heads` and whose states fit; 1 if none fits.

    `state` is the number of elements of a head's state.
    """
    shared = heads // groups
    fits = (n * shared for n in range(1, groups + 1) if groups % n == 0 and n * shared * state <= _STATES)
    return max(fits, default=1)
