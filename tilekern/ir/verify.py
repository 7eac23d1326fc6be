"""Check that a Func is well formed: every type rule holds again, and every value is defined before it is used."""

from __future__ import annotations

from tilekern import source
from tilekern.errors import VerifyError
from tilekern.ir.core import Block, Func, Op, Value, require
from tilekern.ir.types import INDEX

# The attribute of an op whose type rule was found to hold: its operands, regions and results at that time. Ops and the
# types of values never change, so the rule holds for good. A copy of the op has the attribute, too, but other results.
_WELL_TYPED = "_well_typed"


def verify(func: Func) -> None:
    """Raise `VerifyError`, with the user's line of the op, unless `func` obeys the rules of the block IR."""
    require(len(func.body.args) == len(func.axes), "a Func's body takes one index for each axis")
    require(all(a.type == INDEX for a in func.body.args), "a Func's indices are int32 scalars")
    require(all(a.block > 0 and a.extent >= 0 for a in func.axes), f"axes {func.axes}")
    require(all(a.tiles < 2**31 for a in func.axes), f"a Func's indices are int32: {func.axes}")
    require(not func.body.results, "a Func yields nothing")
    is_input = [p.ref.role in ("in", "inout") for p in func.params]
    require(is_input == sorted(is_input, reverse=True), "inputs stand before outputs")
    _verify_block(func.body, set(func.params), set())


def _verify_block(block: Block, visible: set[Value], defined: set[Value]) -> None:
    """Verify a block in time linear in its ops, ops of inner blocks included.

    Args:
      block: the block.
      visible: the values that the block may use. Its own values are added, and removed at its end.
      defined: every value of the function met so far.
    """
    own = list(block.args)
    _define(block.args, visible, defined)
    for op in block.ops:
        with source.at(op.loc):
            _verify_op(op, visible, defined)
        own += op.results
    for value in block.results:
        require(value in visible, f"a block yields %{value.name}: {value.type}, which is not defined there")
    visible.difference_update(own)


def _verify_op(op: Op, visible: set[Value], defined: set[Value]) -> None:
    # The messages are texts of types: formatting them takes longer than the checks, so a check that holds makes none.
    for value in op.operands:
        if value not in visible:
            raise VerifyError(f"{op.name} uses %{value.name}: {value.type}, which is not defined there")
    for region in op.regions:
        _verify_block(region, visible, defined)
    operands, regions, results = op.__dict__.get(_WELL_TYPED, (None, None, None))
    if operands is not op.operands or regions is not op.regions or results is not op.results:
        _verify_types(op)
    _define(op.results, visible, defined)


def _verify_types(op: Op) -> None:
    types, inferred = tuple(v.type for v in op.results), op.infer()
    if inferred != types:
        raise VerifyError(f"{op.name} has results {types}, its rule gives {inferred}")
    op.__dict__[_WELL_TYPED] = (op.operands, op.regions, op.results)


def _define(values: tuple[Value, ...], visible: set[Value], defined: set[Value]) -> None:
    for value in values:
        if value in defined:
            raise VerifyError(f"%{value.name}: {value.type} is defined twice")
        defined.add(value)
        visible.add(value)
