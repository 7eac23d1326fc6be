"""`Print` and `Assert` as callbacks to the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from tilekern import source
from tilekern.errors import DeviceAssertionError
from tilekern.ir.debug import Assert, Print


def callback_of(op: Print | Assert) -> Callable[..., None]:
    """The callback of an op, a function of its operands."""
    if isinstance(op, Print):
        return partial(jax.debug.print, op.format)
    return partial(jax.debug.callback, partial(_check, op))


def _check(op: Assert, predicate: Any) -> None:
    if not np.all(predicate):
        with source.at(op.loc):
            raise DeviceAssertionError(op.message)
