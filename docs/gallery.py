"""Pictures of the library's kernels, for the gallery page: drawn from the small form of a named case."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import jax

import tilekern.kernels
from tilekern.ir.picture import Picture, picture
from tilekern.kernel.composite import called
from tilekern.lower.target import TARGETS

_TARGET = TARGETS["cuda:sm_90"]
"""The target whose schedules choose the tiles: tiles with a power of two of elements show what is masked at edges."""


def tiles(function: str, case: str) -> Picture:
    """The tiles of the first kernel that a function of the library calls.

    Args:
      function: its name in `tilekern.kernels`, which is also the name of its folder.
      case: a name in the folder's `cases.py`. The picture has the sizes of the case's small form.
    """
    cases = importlib.import_module(f"tilekern.kernels.{function}.cases").CASES
    (small,) = (c.small() for c in cases if c.name == case)
    keywords: dict[str, Any] = getattr(small, "keywords", {})
    arrays = jax.eval_shape(partial(small.arrays, dtype="float32"), jax.random.key(0))
    call = partial(getattr(tilekern.kernels, function), **keywords)
    kernel, target = called(jax.make_jaxpr(call)(*arrays), _TARGET)[0]
    return picture(kernel.func(target))
