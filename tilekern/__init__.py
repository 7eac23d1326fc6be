"""tilekern: tile kernels for JAX, from one source on GPU, TPU and CPU."""

from tilekern import errors
from tilekern.kernel import Block, Compiled, Kernel, Lowered, Op, Sum, Traced, Zeros, interpret, kernel, op
from tilekern.lang.functions import accumulator, cdiv, dot, full, zeros
from tilekern.lang.loops import fold, foreach
from tilekern.lang.refs import Ref
from tilekern.lang.tiles import Tile, ds, parallel, serial

__version__ = "0.1.0"

__all__ = [
    "Block",
    "Compiled",
    "Kernel",
    "Lowered",
    "Op",
    "Ref",
    "Sum",
    "Tile",
    "Traced",
    "Zeros",
    "accumulator",
    "cdiv",
    "dot",
    "ds",
    "errors",
    "fold",
    "foreach",
    "full",
    "interpret",
    "kernel",
    "op",
    "parallel",
    "serial",
    "zeros",
]
