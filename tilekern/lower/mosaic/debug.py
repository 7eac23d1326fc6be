"""`Print` and `Assert` inside of a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import numpy as np

from tilekern import source
from tilekern.errors import DeviceAssertion
from tilekern.ir.debug import Assert, Print


def emit(op: Print | Assert, operands: Sequence[Any], interpreted: bool) -> None:
    """Do what the op says, in a kernel that Pallas interprets; a TPU prints scalars, and cannot stop."""
    if isinstance(op, Assert):
        if interpreted:
            jax.debug.callback(partial(_check, op), *operands)
    elif interpreted:
        jax.debug.print(op.format, *operands)
    elif not any(x.shape for x in operands):
        pl.debug_print(op.format, *operands)


def _check(op: Assert, predicate: Any) -> None:
    if not np.all(predicate):
        with source.at(op.loc):
            raise DeviceAssertion(op.message)
