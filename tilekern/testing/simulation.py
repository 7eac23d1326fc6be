"""JAX functions whose kernels run in an interpreter (of the block IR, Triton or Pallas), or as the CPU's code.

The JAX code around the kernels runs operation by operation, as under `jax.disable_jit`; `jax.vmap` and derivatives
apply their rules as always. So one mechanism shows what a kernel, its batches and its derivatives compute on any
target, on a machine without that target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilekern.ir.compute import Dot, Reduce
from tilekern.ir.control import Fold
from tilekern.ir.core import Array, Block, Func
from tilekern.ir.interpret import interpret
from tilekern.kernel.instance import Instance
from tilekern.kernel.packed import packed, unpacked
from tilekern.kernel.primitive import calls_in, calls_run_by
from tilekern.kernel.sharding_rule import ShardingRule
from tilekern.lower.target import DEFAULT, resolve

INTERPRETER = "interpreter"
"""The interpreter of the block IR, which defines the meaning of every operation. It is no target."""

HERE = "here"
"""An ordinary call: compiled by JAX for this machine's default device."""

MESH = "mesh"
"""An ordinary call of arrays that several devices of this machine hold in parts."""


@dataclass
class Simulation:
    """One way to run kernels.

    Attributes:
      where: `INTERPRETER`, or the name of a target.
      funcs: the block IR of the kernels that ran.
    """

    where: str
    funcs: list[Func] = field(default_factory=list[Func])

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The results of a function, as NumPy arrays."""
        with calls_run_by(self._call):
            results = function(*arguments)
        return jax.tree.map(np.asarray, results)

    def _call(self, callee: Any, operands: Sequence[Any]) -> Sequence[Any]:
        target = callee.asked or (DEFAULT if self.where == INTERPRETER else resolve(self.where))
        if not isinstance(callee, Instance):
            with jax.disable_jit():
                return callee.function(target)(*operands)
        version = callee.version(target)
        self.funcs.append(version.func)
        pairs = zip(packed(version.inputs(operands)), version.func.inputs, strict=True)
        inputs = [np.asarray(x, p.ref.dtype) for x, p in pairs]
        found = (
            interpret(version.func, *inputs) if self.where == INTERPRETER else callee.lowered(target).interpret(*inputs)
        )
        return [jnp.asarray(x) for x in unpacked(found, callee.outputs)]


def run_at(where: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """The results of a function as NumPy arrays, its kernels run on a target, in the interpreter, or `HERE`."""
    if where == HERE:
        return jax.tree.map(np.asarray, function(*arguments))
    if where == MESH:
        return jax.tree.map(np.asarray, jax.jit(function)(*divided(function, arguments)))
    return Simulation(where).run(function, *arguments)


def divided(function: Callable[..., Any], arrays: Sequence[Array]) -> list[jax.Array]:
    """Arrays whose first dim that allows it is divided among devices, by the rule of the only kernel of a function.

    They are whole on each device where there is no such rule: then XLA decides.
    """
    calls = calls_in(jax.make_jaxpr(function)(*arrays))
    rule: ShardingRule | None = calls[0][0].sharding if len(calls) == 1 else None
    whole = [("",) * x.ndim for x in arrays]
    # A function may compute further operands of its kernel from its own.
    operands = () if rule is None else rule.operands[: len(arrays)]
    if rule is None or [len(dims) for dims in operands] != [x.ndim for x in arrays]:
        return _placed(arrays, whole, "no dim", jax.device_count())
    for count in range(jax.device_count(), 1, -1):
        for name, sizes in rule.sizes.items():
            if all(size and size % count == 0 for size in sizes):
                return _placed(arrays, operands, name, count)
    return _placed(arrays, whole, "no dim", jax.device_count())


def _placed(arrays: Sequence[Array], operands: Sequence[Sequence[str]], name: str, count: int) -> list[jax.Array]:
    axis = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((count,), ("devices",), axis_types=(axis,), devices=jax.devices()[:count])
    specs = [jax.P(*("devices" if n == name else None for n in dims)) for dims in operands]
    pairs = zip(arrays, specs, strict=True)
    return [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x, spec in pairs]


def longest_sum(func: Func) -> int:
    """The number of terms of the longest sum in a kernel: of dots and reductions, times the tiles of loops around."""
    return max(1, _longest(func.body))


def _longest(block: Block) -> int:
    return max((_terms(op) for op in block.ops), default=1)


def _terms(op: Any) -> int:
    match op:
        case Dot():
            return int(np.prod([op.operands[0].tile.shape[d] for d in op.contract[0]], dtype=int))
        case Reduce():
            return int(np.prod([op.operands[0].tile.shape[d] for d in op.dims], dtype=int))
        case Fold():
            return max(1, op.axis.tiles) * _longest(op.body)
        case _:
            return max(map(_longest, op.regions), default=1)
