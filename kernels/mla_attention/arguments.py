"""The arguments of the kernels: arrays of latents, and what their products are multiplied by."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

import tilekern as tk


class Latents(NamedTuple):
    """Queries, cached latents or new ones: C numbers of a latent and R of a rotated key, along the last dim.

    Attributes:
      latent: [..., C + R]; or [..., C], with the R numbers in `rope`.
      rope: [..., R]; None if `latent` holds both.
    """

    latent: Any
    rope: Any | None

    def widths(self, value_width: int) -> tuple[int, int]:
        """(C, R), where one array of both has `value_width` numbers of a latent."""
        if self.rope is not None:
            return self.latent.shape[-1], self.rope.shape[-1]
        return value_width, self.latent.shape[-1] - value_width

    def columns(self, value_width: int, block_c: int) -> list[tuple[Any, Any]]:
        """(array, its columns) of parts of up to `block_c` columns of the latents; last, of the rotated keys."""
        c, r = self.widths(value_width)
        parts = [(self.latent, tk.ds(start, width)) for start, width in parts_of(c, block_c)]
        return [*parts, (self.latent, tk.ds(c, r)) if self.rope is None else (self.rope, slice(None))]

    def halves(self, value_width: int) -> tuple[jax.Array, jax.Array]:
        """The arrays [..., C] and [..., R]."""
        if self.rope is not None:
            return self.latent, self.rope
        return self.latent[..., :value_width], self.latent[..., value_width:]


def parts_of(width: int, block: int) -> list[tuple[int, int]]:
    """(start, width) of the parts of up to `block` of `width` columns."""
    return [(start, min(block, width - start)) for start in range(0, width, block)]


class LatentPages(NamedTuple):
    """A cache after a write, in the form of the arguments of the public functions.

    Attributes:
      kv_pages: an array [pages, page, C + R] or [pages, page, 1, C + R], or a pair of arrays.
      latent_scale: what latents are multiplied by: None, a number, or floats of shape () or [pages, page].
      rope_scale: the same for rotated keys.
    """

    kv_pages: Any
    latent_scale: Any = None
    rope_scale: Any = None


jax.export.register_namedtuple_serialization(LatentPages, serialized_name="tilekern.LatentPages")


class Scales(NamedTuple):
    """Arrays that cached numbers are multiplied by; None for an array that is missing.

    Attributes:
      latent: float32, of shape [1] or [pages, page].
      rope: the same for rotated keys.
    """

    latent: Any = None
    rope: Any = None
