"""The backward pass of a Func: the Funcs that compute, one after the other, the cotangents of its linear inputs.

The transposed Func adds to sums over programs. Each site of an addition becomes the cheapest of

- a store, if no other tile of the grid or of a fold adds to the same elements;
- a Func of its own with swapped loops (`swap`), if the addends would take much memory;
- a sum over programs, in their order, else.

All three are deterministic. The results of several sites of one array are added up after all stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from tilekern.autodiff.merge import merge
from tilekern.autodiff.saved import SavedState, save
from tilekern.autodiff.swap import swap
from tilekern.autodiff.tangent import name_of, no_derivative
from tilekern.autodiff.transpose import transpose
from tilekern.ir.analysis.sites import Site, is_covering, is_injective, sites
from tilekern.ir.core import Func, Op, Value
from tilekern.ir.make import Make
from tilekern.ir.memory import MemoryOp, Store, WriteOp
from tilekern.ir.records import record
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.types import DType, RefType
from tilekern.passes import pipeline


@record
class Stage:
    """A Func of a backward pass.

    Attributes:
      func: a Func whose inputs are arrays of the pass: inputs of the pass, or results of earlier stages.
      results: the arrays of the pass that its outputs write.
    """

    func: Func
    results: tuple[Value, ...]


@record
class Backward:
    """A backward pass.

    Attributes:
      known: the inputs of the Func in which it is not linear; inputs of the pass.
      cotangents: the cotangents of the outputs; inputs of the pass.
      stages: the stages, in the order in which they run.
      results: for each linear input, the arrays that add up to its cotangent; no array for a cotangent of zeros.
    """

    known: tuple[Value, ...]
    cotangents: tuple[Value, ...]
    stages: tuple[Stage, ...]
    results: tuple[tuple[Value, ...], ...]


def backward(func: Func, linear: Sequence[bool], residuals: int) -> Backward:
    """The backward pass of a Func that is linear in some inputs.

    Args:
      func: see `transpose`.
      linear: see `transpose`.
      residuals: the most bytes of carries that the pass may save.

    Raises:
      NotDifferentiableError: an op cannot be transposed, or the carries take more bytes; at the user's line.
    """
    transposed = transpose(func, linear)
    improved = merge(pipeline.run(transposed.func))
    read = {op.ref for op in improved.walk() if isinstance(op, MemoryOp)}
    needed = [s for s in transposed.states if s.param in read]
    times = transposed.overwrites.times
    unused = {*(s.param for s in transposed.states), *times.values()} - read
    improved = replace(improved, params=tuple(p for p in improved.params if p not in unused))
    dtypes = [p.ref.dtype for p, is_linear in zip(func.inputs, linear, strict=True) if is_linear]
    split = _Stages(improved, dict(zip(improved.outputs, dtypes, strict=True)))
    _check_residuals(func, needed, residuals)
    if needed:
        split.stages.insert(0, _saver(func, transposed.active, needed, transposed.known))
    if not read.isdisjoint(times.values()):
        writer = pipeline.run(transposed.overwrites.writer(transposed.active, transposed.known))
        split.stages.insert(0, Stage(writer, tuple(times.values())))
    return Backward(transposed.known, transposed.cotangents, tuple(split.stages), split.results)


def _check_residuals(func: Func, states: Sequence[SavedState], most: int) -> None:
    total = sum(s.nbytes for s in states)
    if total <= most:
        return
    largest = max(states, key=lambda s: s.nbytes)
    shown = ", ".join(f"{s.carry.args[0].type} at each of {s.count} tiles" for s in states)
    raise no_derivative(
        largest.fold,
        f"the backward pass of {name_of(func)} would save {total} bytes of carries",
        f"at most residuals = {most} bytes",
        shown,
        "use larger blocks, so that the loop has fewer tiles; stop gradients of a carry that does not change the "
        "result, such as a running maximum (lax.stop_gradient); allow more by @tk.kernel(residuals=...); or state the "
        "rule with defjvp",
    )


def _saver(func: Func, active: set[Value], states: list[SavedState], inputs: Sequence[Value]) -> Stage:
    return Stage(pipeline.run(save(func, active, states, inputs)), tuple(s.param for s in states))


class _Stages:
    """The Funcs that a transposed Func is split into.

    Attributes:
      stages: the stages, in the order in which they run.
      results: for each sum, the arrays that add up to the sum.
    """

    def __init__(self, func: Func, dtypes: dict[Value, DType]) -> None:
        self._func, self._dtypes = func, dtypes
        self._sites = sites(func)
        self.stages: list[Stage] = []
        self._arrays: dict[Value, list[Value]] = {ref: [] for ref in dtypes}
        self._stores: dict[int, Value] = {}
        dropped = {n for n, site in enumerate(self._sites) if self._is_elsewhere(n, site)}
        if len(dropped) < len(self._sites):
            self.stages.append(self._remaining(dropped))
        self.results = tuple(map(tuple, self._arrays.values()))

    def _dtype(self, ref: Value) -> DType:
        """The dtype of an array for `ref`: if several arrays are added up, only their sum is rounded."""
        return self._dtypes[ref] if sum(site.op.ref is ref for site in self._sites) == 1 else ref.ref.dtype

    def _name(self, ref: Value, number: int) -> str:
        """The name of the array of a site: the name of the sum, with a number if the sum has several arrays."""
        return ref.name if self._dtype(ref) == self._dtypes[ref] else f"{ref.name}{number}"

    def _is_elsewhere(self, number: int, site: Site) -> bool:
        """True if a site becomes a Func of its own, which is added to the stages; notes a site that becomes a store."""
        ref = site.op.ref
        if is_injective(site, site.axes):
            role = "out" if is_covering(site, self._func) else "zeros"
            self._stores[number] = stored = Value(
                RefType(ref.ref.shape, self._dtype(ref), role), self._name(ref, number)
            )
            self._arrays[ref].append(stored)
            return False
        if not _takes_much(self._func, site):
            return False
        swapped = swap(self._func, number, self._dtype(ref))
        if swapped is None:
            return False
        if swapped.saver is not None:
            self.stages.append(Stage(swapped.saver, swapped.saved))
        self.stages.append(Stage(swapped.func, swapped.func.outputs))
        self._arrays[ref] += swapped.func.outputs
        return True

    def _remaining(self, dropped: set[int]) -> Stage:
        """The Func without the sites that have Funcs of their own."""
        numbers = iter(range(len(self._sites)))

        def rule(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
            if not isinstance(op, WriteOp):
                return None
            number = next(numbers)
            stored = self._stores.get(number)
            if number in dropped:
                return []
            if stored is None:
                return None
            value = Make(rewriter, op).convert(op.value, stored.ref.dtype)
            operands = (stored, value, *op.operands[2:])
            return rewriter.add(Store(operands=operands, access=op.access, masked=op.masked, loc=op.loc))

        func = Rewriter(rule).run(self._func)
        summed = {op.ref for op in func.walk() if isinstance(op, WriteOp) and op.ref in self._arrays}
        for ref in self._arrays:
            if ref in summed:
                self._arrays[ref].append(ref)
        outputs = (*self._stores.values(), *(ref for ref in self._arrays if ref in summed))
        read = {op.ref for op in func.walk() if isinstance(op, MemoryOp)}
        func = pipeline.run(replace(func, params=(*(p for p in func.inputs if p in read), *outputs)))
        return Stage(func, outputs)


def _takes_much(func: Func, site: Site) -> bool:
    """True if the addends of a site, one for each program that adds to an element, take more bytes than all inputs."""
    addends = prod(axis.tiles for index, axis in site.axes.items() if index not in site.used)
    return addends * _nbytes(site.op.ref) > sum(map(_nbytes, func.inputs))


def _nbytes(ref: Value) -> int:
    return prod(ref.ref.shape) * ref.ref.dtype.itemsize
