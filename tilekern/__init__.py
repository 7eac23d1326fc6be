"""tilekern: tile kernels for JAX, from one source on GPU, TPU and CPU."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

from tilekern import backends, errors, export
from tilekern.ir.analysis.costs import Cost
from tilekern.kernel import (
    Block,
    Choice,
    Compiled,
    CompiledOp,
    CustomOp,
    Kernel,
    Lowered,
    LoweredOp,
    Sum,
    Traced,
    TracedOp,
    Zeros,
    interpret,
    kernel,
    load,
    op,
)
from tilekern.kernel.sharding_rule import ShardingRule
from tilekern.kernel.tuned import Tuned, tuned
from tilekern.lang.bits import random_bits, stochastic_round, unpack
from tilekern.lang.directives import debug_print, device_assert, hoist, when
from tilekern.lang.functions import accumulator, cdiv, dot, full, zeros
from tilekern.lang.loops import fold, foreach
from tilekern.lang.points import points
from tilekern.lang.recurrences import linear_scan
from tilekern.lang.refs import Ref
from tilekern.lang.regions import region
from tilekern.lang.serial import serial
from tilekern.lang.tiles import Tile, ds, grid, grouped, parallel, tile
from tilekern.lower.backend import Device
from tilekern.lower.resources import Resources
from tilekern.lower.target import device

if TYPE_CHECKING:
    from tilekern.nn.patching import patch

__version__ = "0.1.0"

__all__ = [
    "Block",
    "Choice",
    "Compiled",
    "CompiledOp",
    "Cost",
    "CustomOp",
    "Device",
    "Kernel",
    "Lowered",
    "LoweredOp",
    "Ref",
    "Resources",
    "ShardingRule",
    "Sum",
    "Tile",
    "Traced",
    "TracedOp",
    "Tuned",
    "Zeros",
    "accumulator",
    "backends",
    "cdiv",
    "debug_print",
    "device",
    "device_assert",
    "dot",
    "ds",
    "errors",
    "export",
    "fold",
    "foreach",
    "full",
    "grid",
    "grouped",
    "hoist",
    "interpret",
    "kernel",
    "linear_scan",
    "load",
    "op",
    "parallel",
    "patch",
    "points",
    "random_bits",
    "region",
    "serial",
    "stochastic_round",
    "tile",
    "tuned",
    "unpack",
    "when",
    "zeros",
]


def __getattr__(name: str) -> _Any:
    """Import `patch`, and so the kernels that it needs, where it is first asked for."""
    if name == "patch":
        return _import_module("tilekern.nn.patching").patch
    raise AttributeError(f"module 'tilekern' has no attribute {name!r}", name=name)
