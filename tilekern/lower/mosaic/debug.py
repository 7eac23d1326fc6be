"""`Print` and `Assert` inside of a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.experimental.pallas as pl

from tilekern.ir.debug import Assert, Print
from tilekern.lower.xla.debug import function_of


def emit(op: Print | Assert, operands: Sequence[Any], interpreted: bool) -> None:
    """Do what the op says, as the portable backend does in a kernel that is interpreted; a TPU prints scalars only."""
    if interpreted:
        function_of(op)(*operands)
    elif isinstance(op, Print) and not any(x.shape for x in operands):
        pl.debug_print(op.format, *operands)
