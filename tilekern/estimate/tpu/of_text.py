"""The program of a Func in text, for the process that compiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from tilekern.ir.core import Array
from tilekern.ir.parse import parse
from tilekern.lower.mosaic.lowering import MosaicLowering
from tilekern.lower.target import resolve
from tilekern.lower.xla.emit import emit_xla

Values = Mapping[str, tuple[str, tuple[int, ...], bytes]]
"""By the param's name the dtype, shape and bytes of an array."""


def source(text: str, target: str, values: Mapping[str, Array]) -> str:
    """Python source of a program for `tilekern.estimate.tpu.estimate`.

    Args:
      text: the Func.
      target: the name of its target.
      values: by the param's name the arrays that become constants of the program.
    """
    constants = {name: (str(x.dtype), x.shape, x.tobytes()) for name, x in values.items()}
    return (
        "from tilekern.estimate.tpu.of_text import program\n"
        f"fn, args = program({text!r}, {target!r}, {constants!r})\n"
        "options = {'xla_msa_enable': False}\n"
    )


def program(text: str, target: str, constants: Values) -> tuple[Callable[..., Any], list[Any]]:
    """The function of a Func on a TPU, and its arguments."""
    lowering = MosaicLowering(parse(text), resolve(target), emit_xla.run)
    arguments: list[Any] = []
    for param in lowering.func.inputs:
        if param.name in constants:
            dtype, shape, contents = constants[param.name]
            arguments.append(np.frombuffer(contents, np.dtype(dtype)).reshape(shape))
        else:
            arguments.append(jax.ShapeDtypeStruct(param.ref.shape, param.ref.dtype))
    return lowering.run, arguments
