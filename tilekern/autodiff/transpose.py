"""The transpose of a Func that is linear in some of its inputs, by reverse-mode rules on its ops.

    func @f_tangent(%x: in, %x_t: in, %o_t: out) {
      %0 = load %x[a]   %1 = exp(%0)   %2 = load %x_t[a]   %3 = mul(%2, %1)   store %3 to %o_t[a] }
  →
    func @f_backward(%x: in, %o_ct: in, %x_ct: sum) {
      %0 = load %x[a]   %1 = exp(%0)   %2 = load %o_ct[a]   %3 = mul(%2, %1)   atomic add %3 to %x_ct[a] }

Each program runs backwards: a store becomes a load of the cotangent at the same access, and a load an addition to the
cotangent of its array. Values that do not depend on the linear inputs are computed again in each block that uses them.
A fold runs its tiles in the opposite order, with the cotangents of its linear carries as carries. The values of its
other carries at each tile are saved by another Func (`saved.save`), and loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from tilekern.autodiff.activity import active_values
from tilekern.autodiff.cotangents import cotangents, is_linear
from tilekern.autodiff.overwrites import Overwrites
from tilekern.autodiff.replay import Replay
from tilekern.autodiff.saved import SavedState, SavedStates
from tilekern.autodiff.tangent import name_of, no_derivative
from tilekern.autodiff.tangents import wide
from tilekern.autodiff.zero_tails import zero_tails
from tilekern.ir.carries import carries
from tilekern.ir.control import Fold, Switch, While
from tilekern.ir.core import Block, Func, Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.make import Make
from tilekern.ir.memory import Atomic, Load, WriteOp
from tilekern.ir.records import record
from tilekern.ir.types import RefType, accumulator


@record
class Transposed:
    """The transpose of a Func.

    Attributes:
      func: a Func of the inputs `known`, the cotangents of the outputs, the saved states and times. Its outputs are
        sums over programs: the cotangents of the inputs in which the Func is linear.
      known: the inputs in which the Func is not linear.
      cotangents: the cotangents of the outputs.
      states: the carries of folds that `func` may load.
      overwrites: the times of the last stores to outputs that `func` may load.
      active: the values of the Func that depend on the inputs in which it is linear.
    """

    func: Func
    known: tuple[Value, ...]
    cotangents: tuple[Value, ...]
    states: tuple[SavedState, ...]
    overwrites: Overwrites
    active: set[Value]


def transpose(func: Func, linear: Sequence[bool]) -> Transposed:
    """The transpose of a Func.

    Args:
      func: a Func whose outputs are floats, which stores no input and loads no output.
      linear: one flag for each input: True for the inputs in which the Func is linear, all together.

    Raises:
      NotDifferentiableError: an op cannot be transposed, at the user's line.
    """
    unknown = [p for p, is_linear in zip(func.inputs, linear, strict=True) if is_linear]
    input_cts = {p: Value(_sum_of(p.ref), f"{p.name.removesuffix('_t')}_ct") for p in unknown}
    output_cts = {p: Value(replace(p.ref, role="in"), f"{p.name.removesuffix('_t')}_ct") for p in func.outputs}
    active = active_values(func, input_cts)
    transposer = _Transposer(func, input_cts, output_cts, active)
    body = transposer.block(func.body.args, lambda *_: transposer.backward())
    fixed = tuple(p for p in func.inputs if p not in input_cts)
    states = transposer.saved.states
    times = transposer.overwrites.times.values()
    params = (*fixed, *output_cts.values(), *(s.param for s in states), *times, *input_cts.values())
    name = f"{name_of(func)}_backward"
    transposed = zero_tails(Func(name, params, func.axes, body, func.loc), output_cts.values())
    return Transposed(transposed, fixed, tuple(output_cts.values()), states, transposer.overwrites, active)


def _sum_of(ref: RefType) -> RefType:
    return RefType(ref.shape, accumulator(ref.dtype), "sum")


class _Transposer(Replay):
    """Emits the reverse of each op, from the last to the first, and adds up cotangents."""

    def __init__(
        self, func: Func, input_cts: dict[Value, Value], output_cts: dict[Value, Value], active: set[Value]
    ) -> None:
        super().__init__(active)
        self._func, self._input_cts, self._output_cts = func, input_cts, output_cts
        self._cotangents: dict[Value, Value] = {}
        self._definitions: dict[Value, Op] = {}
        self.saved, self.overwrites = SavedStates(func), Overwrites(func)

    def add(self, op: Op) -> tuple[Value, ...]:
        self._definitions.update(dict.fromkeys(op.results, op))
        return super().add(op)

    def one(self, op: Op) -> Value:
        (value,) = self.add(op)
        return value

    def backward(self) -> tuple[Value, ...]:
        """Add the whole body; returns its results, which are none: cotangents leave by atomic additions."""
        self.replay(self._func.body)
        self._sweep(self._func.body)
        return ()

    def _sweep(self, block: Block) -> None:
        for op in reversed(block.ops):
            self._transpose(op)

    def _transpose(self, op: Op) -> None:
        if isinstance(op, WriteOp):
            self._write(op)
        elif isinstance(op, (Fold, Switch, While)):
            if self._is_linear(op):
                self._control(op)
        elif not self._active.isdisjoint(op.results):
            cotangent = self._cotangents.pop(op.result, None)
            if cotangent is not None:
                self._load(op, cotangent) if isinstance(op, Load) else self._pure(op, cotangent)

    def _is_linear(self, op: Op) -> bool:
        """True if a result of a control op, or an op in its regions, depends on the linear inputs."""
        return any(
            not self._active.isdisjoint(inner.results) or (isinstance(inner, WriteOp) and inner.value in self._active)
            for inner in op.walk()
        )

    def _control(self, op: Fold | Switch | While) -> None:
        if isinstance(op, Fold):
            self._fold(op)
        elif isinstance(op, Switch):
            self._switch(op)
        else:
            raise no_derivative(
                op,
                f"a while loop of {name_of(self._func)} cannot run backwards",
                "loops of a known largest number of steps, where reverse-mode derivatives pass",
                "lax.while_loop, or a lax.fori_loop with traced bounds, over values that are differentiated",
                "use tk.fold(tk.serial(...)), stop gradients before the loop (lax.stop_gradient), or use forward mode",
            )

    def _accumulate(self, value: Value, cotangent: Value, make: Make) -> None:
        if value in self._active:
            total = self._cotangents.get(value)
            self._cotangents[value] = cotangent if total is None else make.of("add", total, cotangent)

    def _write(self, op: WriteOp) -> None:
        if op.value not in self._active:
            return
        make = Make(self, op)
        operands = tuple(map(self.copy_of, op.operands[2:]))
        loaded = Load(operands=(self._output_cts[op.ref], *operands), access=op.access, masked=op.masked, loc=op.loc)
        cotangent = make.convert(self.one(loaded), wide(op.value.tile).dtype)
        if op.ref in self.overwrites.times:
            last = self.one(loaded.copy((self.overwrites.times[op.ref], *operands)))
            cotangent = make.select(make.of("le", last, self.overwrites.time(op, self, make)), cotangent, 0)
        self._accumulate(op.value, cotangent, make)

    def _load(self, op: Load, cotangent: Value) -> None:
        if op.fill is not None and op.fill in self._active:
            raise no_derivative(
                op,
                "a load with a fill cannot be transposed",
                "a fill that depends on nothing that is differentiated",
                f"the fill of a load of {op.ref.name}",
                "load with the default fill, and choose by jnp.where",
            )
        access_operands = op.operands[1 : len(op.operands) - op.trailing]
        operands = (self._input_cts[op.ref], cotangent, *map(self.copy_of, access_operands))
        self.add(Atomic(operands=operands, access=op.access, masked=op.masked, kind="add", loc=op.loc))

    def _pure(self, op: Op, cotangent: Value) -> None:
        make = Make(self, op)
        linear = [v in self._active for v in op.operands]
        if not is_linear(op, linear):
            raise no_derivative(
                op,
                f"{name_of(self._func)} is not linear in what it is transposed in",
                "sums, and products with what does not depend on it",
                f"{op.function if isinstance(op, Elementwise) else op.name} of it",
                "differentiate it first, as jax.vjp does, instead of jax.linear_transpose",
            )
        fixed = [None if is_linear else self.copy_of(v) for v, is_linear in zip(op.operands, linear, strict=True)]
        addends = cotangents(op, fixed, linear, cotangent, make, self._definitions.get)
        for operand, addend in zip(op.operands, addends, strict=True):
            if addend is not None:
                self._accumulate(operand, addend, make)

    def _zeros(self, value: Value, make: Make) -> Value:
        return make.number(0, wide(value.tile))

    def _taken(self, value: Value, make: Make) -> Value:
        """Removes and returns the cotangent of a value that no earlier op uses; zeros, in a wide float, without any."""
        cotangent = self._cotangents.pop(value, None)
        return self._zeros(value, make) if cotangent is None else cotangent

    @contextmanager
    def _own_cotangents(self):
        outer, self._cotangents = self._cotangents, {}
        try:
            yield
        finally:
            self._cotangents = outer

    def _outer(self, op: Op) -> list[Value]:
        """The values that depend on the linear inputs, and that an op's regions use and do not define; each once."""
        inside = {r for inner in op.walk() for r in inner.results}
        inside |= {a for inner in op.walk() for region in inner.regions for a in region.args}
        used = (v for region in op.regions for v in (*(u for o in region.ops for u in o.uses()), *region.results))
        return [v for v in dict.fromkeys(used) if v in self._active and v not in inside]

    def _fold(self, op: Fold) -> None:
        make = Make(self, op)
        linear = [c for c in carries(op) if c.result in self._active]
        outer = self._outer(op)
        result_cotangents = [self._taken(c.result, make) for c in linear]
        starts = [*result_cotangents, *(self._zeros(v, make) for v in outer)]
        index = Value(op.body.args[0].type, op.body.args[0].name)
        args = tuple(
            Value(v.type, f"{name.name}_ct")
            for v, name in zip(starts, [*(c.args[0] for c in linear), *outer], strict=True)
        )

        def body(*_: Value) -> tuple[Value, ...]:
            self._copies[op.body.args[0]] = index
            with self.saved.inside(op, index):
                for c in carries(op):
                    if c.result not in self._active:
                        self._copies[c.args[0]] = self.one(self.saved.load(op, c))
                self.replay(op.body)
                with self._own_cotangents():
                    for c, arg in zip(linear, args, strict=False):
                        self._accumulate(c.yielded, arg, make)
                    self._sweep(op.body)
                    arg_cotangents = [self._taken(c.args[0], make) for c in linear]
                    addends = [self._cotangents.pop(v, None) for v in outer]
            sums = zip(args[len(linear) :], addends, strict=True)
            return (*arg_cotangents, *(arg if f is None else make.of("add", arg, f) for arg, f in sums))

        region = self.block((index, *args), body)
        bounds = tuple(map(self.copy_of, op.operands[:2]))
        # Sums alone do not depend on the order of tiles, and run forward: hardware loads ahead best in that order.
        ordered = any(after is not arg for after, arg in zip(region.results, args[: len(linear)], strict=False))
        reverse = op.reverse != ordered
        results = self.add(replace(op, operands=(*bounds, *starts), regions=(region,), reverse=reverse))
        for value, cotangent in zip([*(c.init for c in linear), *outer], results, strict=True):
            self._accumulate(value, cotangent, make)

    def _switch(self, op: Switch) -> None:
        make = Make(self, op)
        outer = self._outer(op)
        result_cotangents = [(n, self._taken(r, make)) for n, r in enumerate(op.results) if r in self._active]

        def body(region: Block) -> tuple[Value, ...]:
            self.replay(region)
            with self._own_cotangents():
                for number, cotangent in result_cotangents:
                    self._accumulate(region.results[number], cotangent, make)
                self._sweep(region)
                return tuple(self._taken(v, make) for v in outer)

        regions = tuple(self.block((), partial(body, region)) for region in op.regions)
        results = self.add(op.copy(tuple(map(self.copy_of, op.operands)), regions))
        for value, cotangent in zip(outer, results, strict=True):
            self._accumulate(value, cotangent, make)
