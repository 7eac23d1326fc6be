"""The tangent of a Func, by forward-mode rules on its ops.

    func @f(%x: in, %o: out) { %0 = load %x[a]   %1 = exp(%0)   store %1 to %o[a] }
  →
    func @f_tangent(%x: in, %x_t: in, %o_t: out) {
      %0 = load %x[a]   %1 = exp(%0)   %2 = load %x_t[a]   %3 = mul(%2, %1)   store %3 to %o_t[a] }

Every value has a tangent of `accumulator(dtype)`, or none if it depends on no input that moves. The tangent Func is
linear in the tangents of inputs. It stores tangents of outputs and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from tilekern import source
from tilekern.autodiff.activity import active_values, is_float
from tilekern.autodiff.tangents import tangents, wide
from tilekern.autodiff.zero_tails import zero_tails
from tilekern.errors import NotDifferentiableError
from tilekern.ir.control import Fold, Switch, While
from tilekern.ir.core import Block, Builder, Func, Op, Value
from tilekern.ir.debug import Assert, Print
from tilekern.ir.make import Make
from tilekern.ir.memory import Atomic, Load, WriteOp


def tangent(func: Func, wrt: Sequence[bool]) -> Func:
    """The tangent of a Func.

    Args:
      func: a verified Func.
      wrt: one flag for each input: True if it moves; inputs of integers do not.

    Returns:
      A Func of the inputs, then the tangents of the moving inputs. Its outputs are the tangents of the float outputs.

    Raises:
      NotDifferentiableError: an op that depends on a moving input has no derivative, at the user's line.
    """
    _check_effects(func)
    moving = [p for p, moved in zip(func.inputs, wrt, strict=True) if moved]
    for param in moving:
        if not is_float(param):
            with source.at(func.loc):
                raise NotDifferentiableError(
                    f"{param.name} of {func.name} has no tangent",
                    expected="floats of at least 8 bits",
                    got=f"{param.name} in two to a byte",
                    fix="stop its gradient (lax.stop_gradient), or unpack it before the call",
                )
    input_tangents = {p: Value(replace(p.ref, role="in"), f"{p.name}_t") for p in moving}
    output_tangents = {p: Value(p.ref, f"{p.name}_t") for p in func.outputs if is_float(p)}
    builder = _Tangent(input_tangents, output_tangents, active_values(func, input_tangents))
    body = builder.block(func.body.args, lambda *_: builder.inline(func.body))
    # Of integers that programs update there is no tangent: the array is an input that this Func does not touch.
    inputs = [p if p.ref.role == "in" else Value(replace(p.ref, role="in"), p.name) for p in func.inputs]
    params = (*inputs, *input_tangents.values(), *output_tangents.values())
    return zero_tails(Func(f"{func.name}_tangent", params, func.axes, body, func.loc), input_tangents.values())


def _check_effects(func: Func) -> None:
    """Refuse a Func whose programs load arrays that they store to: its meaning is a sequence of states of memory."""
    for op in func.walk():
        if isinstance(op, Load) and op.ref.ref.role != "in":
            role = "a donated input" if op.ref.ref.role == "inout" else "an output"
            raise no_derivative(
                op,
                f"{func.name} loads {op.ref.name}, {role}, and so has no derivative",
                "a kernel that loads inputs and stores outputs",
                f"a load of {op.ref.name}, which programs also store to",
                "keep the stored value in a variable or a carry; make a donated input an input and an output",
            )
    for param in func.params:
        if param.ref.role == "inout" and is_float(param):
            with source.at(func.loc):
                raise NotDifferentiableError(
                    f"{func.name} writes to its input {param.name}, and so has no derivative",
                    expected="a kernel that loads inputs and stores outputs",
                    got=f"{param.name} is donated",
                    fix=f"leave {param.name} out of donate where derivatives are needed, or state the rule with defjvp",
                )


def no_derivative(op: Op, summary: str, expected: str, got: str, fix: str) -> NotDifferentiableError:
    """The error for an op that cannot be differentiated, at the user's line."""
    with source.at(op.loc):
        return NotDifferentiableError(summary, expected=expected, got=got, fix=fix)


def name_of(func: Func) -> str:
    """The name of the kernel of a Func or of a tangent Func."""
    return func.name.removesuffix("_tangent")


class _Tangent(Builder):
    """Copies blocks; behind each op that defines an active value, adds the ops of its tangent."""

    def __init__(
        self, input_tangents: dict[Value, Value], output_tangents: dict[Value, Value], active: set[Value]
    ) -> None:
        super().__init__()
        self._input_tangents, self._output_tangents, self._active = input_tangents, output_tangents, active
        self._copies: dict[Value, Value] = {}
        self._moving: dict[Value, Value] = {}

    def copy_of(self, value: Value) -> Value:
        """The value of the tangent Func for a value of the Func."""
        return self._copies.get(value, value)

    def inline(self, block: Block) -> tuple[Value, ...]:
        """Add the ops of a block; returns the values that it yields."""
        for op in block.ops:
            self._visit(op)
        return tuple(map(self.copy_of, block.results))

    def _visit(self, op: Op) -> None:
        if isinstance(op, (Print, Assert)):
            return  # the kernel itself prints and asserts
        if isinstance(op, Load):
            self._load(op)
        elif isinstance(op, WriteOp):
            self._write(op)
        elif isinstance(op, Switch):
            self._switch(op)
        elif isinstance(op, (Fold, While)):
            self._loop(op)
        else:
            self._pure(op)

    def _copy[T: Op](self, op: T) -> T:
        operands = tuple(map(self.copy_of, op.operands))
        return op if operands == op.operands else op.copy(operands)

    def _define(self, op: Op, results: Sequence[Value]) -> None:
        self._copies.update(zip(op.results, results, strict=True))

    def _pure(self, op: Op) -> None:
        self._define(op, self.add(self._copy(op)))
        if self._active.isdisjoint(op.results):
            return
        moving = [self._moving.get(v) for v in op.operands]
        results = [self.copy_of(r) for r in op.results]
        result_tangents = tangents(op, [self.copy_of(v) for v in op.operands], results, moving, Make(self, op))
        self._moving.update((r, t) for r, t in zip(op.results, result_tangents, strict=True) if t is not None)

    def _load(self, op: Load) -> None:
        copy = self._copy(op)
        self._define(op, self.add(copy))
        make = Make(self, op)
        fill = None if op.fill is None else self._moving.get(op.fill)
        ref = self._input_tangents.get(op.ref)
        if ref is None:
            if fill is not None:
                raise no_derivative(
                    op,
                    "a fill of a load cannot be differentiated",
                    "a fill that depends on no array that is differentiated",
                    f"the fill of a load of {op.ref.name}",
                    "load with the default fill, and choose by jnp.where",
                )
            return
        access_operands = copy.operands[1 : len(copy.operands) - copy.trailing]
        filled = () if fill is None else (make.convert(fill, op.ref.ref.dtype),)
        loaded = self.one(replace(copy, operands=(ref, *access_operands, *filled), filled=bool(filled)))
        self._moving[op.result] = make.convert(loaded, wide(op.result.tile).dtype)

    def _write(self, op: WriteOp) -> None:
        ref = self._output_tangents.get(op.ref)
        if ref is None:
            return
        if isinstance(op, Atomic) and op.kind != "add":
            raise no_derivative(
                op,
                f"an atomic {op.kind} has no derivative",
                "stores, and atomic additions",
                f"an atomic {op.kind} of {op.ref.name}",
                "reduce in a fold, or state the rule with defjvp",
            )
        copy = self._copy(op)
        make = Make(self, op)
        moving = self._moving.get(op.value)
        if moving is None and isinstance(op, Atomic):
            return
        stored = make.number(0, op.value.tile) if moving is None else make.convert(moving, op.value.tile.dtype)
        self.add(copy.copy((ref, stored, *copy.operands[2:])))

    def _tangent_or_zeros(self, value: Value, make: Make) -> Value:
        moving = self._moving.get(value)
        return make.number(0, wide(value.tile)) if moving is None else moving

    def _loop(self, op: Fold | While) -> None:
        inits = op.inits if isinstance(op, Fold) else op.operands
        active_numbers = [n for n, r in enumerate(op.results) if r in self._active]
        make = Make(self, op)
        init_tangents = [self._tangent_or_zeros(inits[n], make) for n in active_numbers]
        leading = len(op.operands) - len(inits)
        regions: list[Block] = []
        for region in op.regions:
            carried = [region.args[len(region.args) - len(inits) + n] for n in active_numbers]
            moving = tuple(Value(wide(arg.tile), f"{arg.name}_t") for arg in carried)
            self._moving.update(zip(carried, moving, strict=True))
            yielded = [] if isinstance(op, While) and region is op.condition else active_numbers
            regions.append(self.block((*region.args, *moving), partial(self._region, region, yielded, make)))
        operands = (*map(self.copy_of, op.operands[: leading + len(inits)]), *init_tangents)
        results = self.add(op.copy(operands, tuple(regions)))
        self._define(op, results[: len(inits)])
        self._moving.update(zip((op.results[n] for n in active_numbers), results[len(inits) :], strict=True))

    def _region(self, region: Block, active_numbers: Sequence[int], make: Make, *_: Value) -> tuple[Value, ...]:
        """Add the ops of a region; returns its results, and the tangents of the results at `active_numbers`."""
        results = self.inline(region)
        return (*results, *(self._tangent_or_zeros(region.results[n], make) for n in active_numbers))

    def _switch(self, op: Switch) -> None:
        active_numbers = [n for n, r in enumerate(op.results) if r in self._active]
        make = Make(self, op)

        regions = tuple(self.block((), partial(self._region, region, active_numbers, make)) for region in op.regions)
        results = self.add(op.copy(tuple(map(self.copy_of, op.operands)), regions))
        self._define(op, results[: len(op.results)])
        self._moving.update(zip((op.results[n] for n in active_numbers), results[len(op.results) :], strict=True))
