"""Mask only the tiles that need it, by a branch in the loop, on request of a backend.

Needs: a canonical Func. Gives: a Func for the pipeline of passes, which simplifies the branches.

    fold k { s = select(m, x, y) }                → fold k { s = switch(k in the middle) {select(m, x, y)} {x} }

    fold k { s = select(m and n, x, y) }          → fold k { s = select(n, switch(k in the middle) {…m…} {x}, y) }

Some comparisons of positions hold for all lanes in the middle tiles of a fold; see `middle_tiles`. There a select by
such comparisons needs no mask; in other tiles the branch computes it. Other conjuncts of the mask stay outside of the
branch, whose other side is then empty: Triton 3.6 fails to compile a branch with a select on both sides. `split_loops`
makes several loops instead, each with a copy of the body. One loop has less code, and fills its pipeline once. It
leaves no matrix product in flight where one loop ends and the next may not run at all: for such a product, NVIDIA's
assembler makes all products of the kernel wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce

from tilekern.ir.analysis.affine import Lines
from tilekern.ir.analysis.backward_slice import backward_slice, index_values
from tilekern.ir.analysis.ranges import analyze, update
from tilekern.ir.compute import Dot, Select
from tilekern.ir.control import Fold, Switch
from tilekern.ir.core import Block, Func, Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.make import Make
from tilekern.ir.rewrite import Cloner, Rewriter
from tilekern.ir.shape import Broadcast, Reshape, Transpose
from tilekern.ir.types import INDEX
from tilekern.passes.middle_tiles import Middle, Proof, crossing


def guard_masks(func: Func, *, beside: Callable[[Dot], bool]) -> Func:
    """Apply the rewrite above to every fold that has such masks.

    Args:
      func: a canonical Func.
      beside: True for dots that a machine computes beside other ops; folds without such a dot stay as they are.
    """
    ranges = analyze(func)

    def rule(op: Op, rewriter: Rewriter) -> Sequence[Value] | None:
        update(ranges, op)
        if (
            not isinstance(op, Fold)
            or op.axis.tiles < 2
            or not any(isinstance(o, Dot) and beside(o) for o in op.body.ops)
        ):
            return None
        lines = Lines(op, rewriter.definition, ranges)
        proof = Proof(op, lines, accesses=False)
        masks: dict[Op, list[Op]] = {
            o: s for o in op.body.ops if isinstance(o, Select) and (s := _mask(op.body, o, proof))
        }
        return _guard(op, proof, masks, lines, rewriter) if masks else None

    return Rewriter(rule).run(func)


def _mask(body: Block, select: Select, proof: Proof) -> list[Op]:
    """The ops of a mask, if comparisons that hold in the middle have a part in it; else none."""
    op_of = {op.results[0]: op for op in body.ops if len(op.results) == 1}
    mask_ops, pending = set[Op](), [select.operands[0]]
    while pending:
        op = op_of.get(pending.pop())
        combines = isinstance(op, Elementwise) and op.function in ("and", "or", "xor", "not")
        if op is not None and (op in proof.comparisons or combines or isinstance(op, (Broadcast, Reshape, Transpose))):
            mask_ops.add(op)
            pending += [] if op in proof.comparisons else op.operands
    compared = mask_ops & proof.comparisons
    positions = index_values(body)
    before = backward_slice(body.ops, [v for op in compared for v in op.operands])
    mask_ops.update(op for op in before if positions.issuperset(op.results))
    return [op for op in body.ops if op in mask_ops] if compared else []


def _guard(op: Fold, proof: Proof, masks: dict[Op, list[Op]], lines: Lines, rewriter: Rewriter) -> Sequence[Value]:
    outside, cloner = Make(rewriter), Cloner()
    rising = [crossing(outside, line, lines, op.axis.tiles) for line in proof.lines if line.slope > 0]
    falling = [crossing(outside, line, lines, op.axis.tiles) for line in proof.lines if line.slope < 0]
    fresh = tuple(Value(arg.type, arg.name) for arg in op.body.args)
    for old, new in zip(op.body.args, fresh, strict=True):
        cloner.replace(old, new)

    def body(*_: Value) -> tuple[Value, ...]:
        make = Make(cloner)
        inside = [make.of("ge", fresh[0], reduce(partial(make.of, "max"), rising))] if rising else []
        inside += [make.of("lt", fresh[0], reduce(partial(make.of, "min"), falling))] if falling else []
        middle = make.convert(reduce(partial(make.of, "and"), inside), INDEX.dtype)
        for inner in op.body.ops:
            if isinstance(inner, Select) and inner in masks:
                within, outer = _conjuncts(op.body, inner, masks[inner], proof)
                regions = (
                    _copied(Cloner(), masks[inner], inner, within, cloner),
                    _copied(Middle(proof), masks[inner], inner, within, cloner),
                )
                (result,) = cloner.add(Switch(operands=(middle,), regions=regions, loc=inner.loc))
                if outer:
                    predicate = reduce(partial(make.of, "and"), map(cloner.value, outer))
                    result = cloner.one(inner.copy((predicate, result, cloner.value(inner.operands[2]))))
                cloner.replace(inner.result, result)
            else:
                cloner.visit(inner)
        return tuple(cloner.value(v) for v in op.body.results)

    return rewriter.add(op.copy(regions=(cloner.block(fresh, body),)))


def _conjuncts(body: Block, select: Select, mask: Sequence[Op], proof: Proof) -> tuple[list[Value], list[Value]]:
    """The conjuncts of a mask: (conjuncts by comparisons that hold in the middle, all other conjuncts)."""
    op_of = {op.results[0]: op for op in body.ops if len(op.results) == 1}
    conjuncts: tuple[list[Value], list[Value]] = [], []
    pending = [select.operands[0]]
    while pending:
        value = pending.pop()
        op = op_of.get(value)
        if isinstance(op, Elementwise) and op.function == "and":
            pending += reversed(op.operands)
        else:
            conjuncts[proof.comparisons.isdisjoint(backward_slice(mask, [value]))].append(value)
    return conjuncts


def _copied(copier: Cloner, mask: Sequence[Op], select: Select, within: Sequence[Value], names: Rewriter) -> Block:
    """A region that computes a select by the conjunction of `within`; `names` holds the copies of outer values."""
    needed = [op for op in mask if op in backward_slice(mask, within)]
    for value in (v for op in (*needed, select) for v in op.operands):
        copier.replace(value, names.value(value))

    def body() -> tuple[Value, ...]:
        for op in needed:
            copier.visit(op)
        predicate = reduce(partial(Make(copier).of, "and"), map(copier.value, within))
        return tuple(copier.visit(select.copy((predicate, *select.operands[1:]))))

    return copier.block((), body)
