"""`Print` and `Assert` inside of a kernel; TPUs print scalars only, and do not assert."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

from tilekern.ir.debug import Assert, Print
from tilekern.ir.quote import visible
from tilekern.ir.types import F32, I32, kind_of
from tilekern.lower.host_callbacks import callback_of


def emit(op: Print | Assert, operands: Sequence[Any], interpreted: bool) -> None:
    """Emit the op: a callback to the host in an interpreted kernel, else a print of scalars."""
    if interpreted:
        callback_of(op)(*operands)
    elif isinstance(op, Print) and not any(x.shape for x in operands):
        fields = [number for _, number in op.pieces if number is not None]
        pl.debug_print(_format(op), *(_printed(operands[number]) for number in fields))


def _format(op: Print) -> str:
    """The format for TPUs: a plain `{}` for each value in order; other braces, and dollars, are escaped."""
    texts = ((re.sub(r"[{}$]", _escaped, visible(text)), number) for text, number in op.pieces)
    return "".join(text if number is None else f"{text}{{}}" for text, number in texts)


def _escaped(match: re.Match[str]) -> str:
    return f"\\x{ord(match.group()):02x}"


def _printed(x: Any) -> jax.Array:
    """A scalar in 32 bits: TPUs print no narrower scalar."""
    if x.dtype.itemsize == 4:
        return x
    return jnp.asarray(x, F32 if kind_of(x.dtype) == "float" else I32)
