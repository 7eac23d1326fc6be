from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from tests.ir.funcs import EXAMPLES, FILE, access_of, at, every_op, func, funcs, gather, index_value, matmul, ref, whole
from tilekern.errors import VerifyError
from tilekern.ir.compute import splat
from tilekern.ir.control import Fold, Switch, While
from tilekern.ir.core import Axis, Block, Func, Op, Value
from tilekern.ir.elementwise import Elementwise
from tilekern.ir.memory import Access, Dim, Load, Position, Store, Term
from tilekern.ir.types import BOOL, F32, I32, INDEX, TileType
from tilekern.ir.verify import verify
from tilekern.source import UNKNOWN, Loc

LOC = Loc(FILE, 7)


def tile(shape: tuple[int, ...] = (), dtype: Any = F32) -> Value:
    return Value(TileType(shape, dtype))


def constant(value: float = 0, **fields: Any) -> Op:
    return splat(value, INDEX, **fields)


def negated(value: Value) -> Op:
    return Elementwise(operands=(value,), function="neg", loc=LOC)


def body(*ops: Op, args: tuple[Value, ...] = (), results: tuple[Value, ...] = ()) -> Func:
    return Func("f", (), (), Block(args, ops, results))


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_examples_verify(example: Callable[[], Func]) -> None:
    verify(example())


@given(funcs())
def test_random_funcs_verify(func: Func) -> None:
    verify(func)


def test_shadowing_blocks_of_one_name_verify() -> None:
    verify(every_op())


# --- the function ----------------------------------------------------------------------------------------------------

A, B = constant(), constant()
I = index_value("i")  # noqa: E741 -- the name of the index
INSIDE = constant()
REGION = Switch(operands=(A.result,), regions=(Block((), (INSIDE,), ()),))
STALE = negated(A.result)
object.__setattr__(STALE, "results", (tile((3,)),))
BENT = Elementwise(operands=(A.result, A.result), function="add", loc=LOC)
object.__setattr__(BENT, "function", "exp")

BROKEN: dict[str, tuple[Func, Loc | None]] = {
    "takes one index for each axis": (replace(body(), axes=(Axis("i", 3),)), None),
    "indices are int32 scalars": (replace(body(args=(tile(),)), axes=(Axis("i", 3),)), None),
    "block=0": (replace(body(args=(I,)), axes=(Axis("i", 3, 0),)), None),
    "extent=-1": (replace(body(args=(I,)), axes=(Axis("i", -1),)), None),
    "yields nothing": (body(A, results=(A.result,)), None),
    "inputs stand before outputs": (replace(body(), params=(ref("o", (), "out"), ref("x", ()))), None),
    "elementwise uses %x: i32": (body(negated(Value(INDEX, "x"))), LOC),
    "uses %later": (body(negated((late := constant(hint="later")).result), late), LOC),
    "%twice: i32[] is defined twice": (body(*[constant(hint="twice")] * 2), None),
    "is defined twice": (replace(body(args=(I, I)), axes=(Axis("i", 3),) * 2), None),
    "uses %: i32[], which": (body(A, REGION, negated(INSIDE.result)), LOC),
    "a block yields %": (body(A, Switch(operands=(A.result,), regions=(Block((), (), (B.result,)),))), None),
    "its rule gives": (body(A, STALE), LOC),
    "exp takes 1 operands, got 2": (body(A, BENT), LOC),
}


@pytest.mark.parametrize("message", BROKEN)
def test_broken_functions(message: str) -> None:
    func, loc = BROKEN[message]
    with pytest.raises(VerifyError) as caught:
        verify(func)
    assert message in caught.value.summary
    if loc:
        assert caught.value.loc == loc, "the line of the op"


def test_what_changes_in_a_verified_op_or_its_copy_is_verified_again() -> None:
    first = negated(A.result)
    verify(body(A, first))
    copy = first.copy()
    for op in (first, copy):
        object.__setattr__(op, "results", (tile((3,)),))
        with pytest.raises(VerifyError, match="its rule gives"):
            verify(body(A, op))


def test_an_argument_of_two_regions_is_defined_twice() -> None:
    arg = Value(INDEX, "n")
    more = Elementwise(operands=(arg, arg), function="lt")
    start = constant()
    regions = (Block((arg,), (more,), more.results), Block((arg,), (), (arg,)))
    with pytest.raises(VerifyError, match=r"%n: i32.* is defined twice"):
        verify(body(start, While(operands=(start.result,), regions=regions)))


def test_a_region_sees_what_is_around_it_and_its_result_is_seen_behind() -> None:
    start = constant()
    inner = negated(start.result)
    outer = Switch(operands=(start.result,), regions=(Block((), (inner,), inner.results),))
    verify(body(start, outer, negated(outer.result)))


def test_a_ref_is_visible_only_as_a_param() -> None:
    foreign = matmul()
    with pytest.raises(VerifyError, match="load uses %x"):
        verify(replace(foreign, params=foreign.params[1:]))


# --- the type rules of memory and control ----------------------------------------------------------------------------

X, OUT = ref("x", (4, 6)), ref("out", (4,), "out")
N, ROWS = tile((), I32), tile((3,), I32)
AXIS = Axis("k", 9, 4)
SCALARS = Access((Dim("index", Position((Term(0, 1),))), Dim("index", Position())))
NEXT = Block((N,), (), (N,))
TRUE = tile((), BOOL)


def load(*operands: Value, access: Access = SCALARS, **fields: Any) -> Callable[[], Op]:
    return lambda: Load(operands=operands, access=access, **fields)


def store(*operands: Value, **fields: Any) -> Callable[[], Op]:
    return lambda: Store(operands=operands, access=access_of((whole(4),))[0], **fields)


def fold(args: tuple[Value, ...], results: tuple[Value, ...], *operands: Value, axis: Axis = AXIS) -> Callable[[], Op]:
    return lambda: Fold(operands=operands, axis=axis, regions=(Block(args, (), results),))


def dims(*kinds: Dim) -> Access:
    return Access(kinds)


ILL_TYPED: dict[str, Callable[[], Op]] = {
    "load takes 2 operands, got 0": load(),
    "load takes 2 operands, got 1": load(X),
    "load takes 2 operands, got 3": load(X, N, N),
    "load takes 4 operands, got 2": load(X, N, masked=True, filled=True),
    "expected a ref": load(N, N),
    "with 1 dims": load(X, N, access=access_of((at(N),))[0]),
    "index of size 1 by operands [(3,)]": load(X, ROWS),
    "block of size 2 by operands [(3,)]": load(
        X, ROWS, access=dims(Dim("block", Position((Term(0, 1),)), 2), Dim("index", Position()))
    ),
    "gather of size 3 by operands [()]": load(
        X, N, access=dims(Dim("gather", Position((Term(0, 1),)), 3), Dim("index", Position()))
    ),
    "gather of size 4 by operands [(3,)]": load(
        X, ROWS, access=dims(Dim("gather", Position((Term(0, 1),)), 4), Dim("index", Position()))
    ),
    "gather of size 3 by operands [(3,), (3,)]": load(
        X, ROWS, access=dims(Dim("gather", Position((Term(0, 1), Term(0, 1))), 3), Dim("index", Position()))
    ),
    "along of size 3 behind no gather of that size": load(
        X, ROWS, access=dims(Dim("along", Position((Term(0, 1),)), 3), Dim("index", Position()))
    ),
    "along of size 2 behind no gather of that size": load(
        X, ROWS, access=dims(Dim("gather", Position((Term(0, 1),)), 3), Dim("along", Position((Term(0, 1),)), 2))
    ),
    "along of size 3 by operands [()]": load(
        X, ROWS, N, access=dims(Dim("gather", Position((Term(0, 1),)), 3), Dim("along", Position((Term(1, 1),)), 3))
    ),
    "as [5], of other size": load(X, access=Access((Dim("index", Position()),), (5,))),
    "as [-1, -1]": load(X, access=Access((Dim("index", Position()),) * 2, (-1, -1))),
    "index of size 2": load(X, access=dims(Dim("index", Position(), 2), Dim("index", Position()))),
    "block of size -1": load(X, access=dims(Dim("block", Position(), -1), Dim("index", Position()))),
    "a position must be int32, got f32[]": load(X, tile()),
    "mask of the wrong type": load(X, N, N, masked=True),
    "fill of f32[] is no scalar of its dtype": load(X, N, N, filled=True),
    "store to an input": lambda: Store(operands=(X, tile((4, 6))), access=access_of((whole(4), whole(6)))[0]),
    "store of f32[5] to an access of f32[4]": store(OUT, tile((5,))),
    "store of i32[4] to an access of f32[4]": store(OUT, tile((4,), I32)),
    "store takes 2 operands, got 1": store(OUT),
    "a fold has one region": lambda: Fold(operands=(N, N), axis=AXIS),
    "fold bounds must be int32 scalars": fold((N,), (), N, tile()),
    "fold over Axis(name='k', extent=9, block=0": fold((N,), (), N, N, axis=Axis("k", 9, 0)),
    "must be the index and the carries": fold((N,), (), N, N, tile()),
    "a fold must yield carries of the initial types": fold((N, tile()), (N,), N, N, tile()),
    "a while has two regions": lambda: While(operands=(N,), regions=(NEXT,)),
    "regions must be the carries": lambda: While(operands=(tile(),), regions=(NEXT, NEXT)),
    "condition must yield one bool": lambda: While(operands=(N,), regions=(NEXT, NEXT)),
    "a while must yield carries": lambda: While(
        operands=(N,), regions=(Block((N,), (), (TRUE,)), Block((N,), (), (TRUE,)))
    ),
    "a switch takes one int32 scalar": lambda: Switch(operands=(tile(),), regions=(Block((), (), ()),)),
    "a switch needs a region": lambda: Switch(operands=(N,)),
    "must yield the same types": lambda: Switch(operands=(N,), regions=(Block((), (), (N,)), Block((), (), ()))),
    "regions of a switch take no arguments": lambda: Switch(operands=(N,), regions=(NEXT,)),
}


@pytest.mark.parametrize("message", ILL_TYPED)
def test_ill_typed_ops_cannot_be_made(message: str) -> None:
    with pytest.raises(VerifyError) as caught:
        ILL_TYPED[message]()
    assert message in caught.value.summary


def test_well_typed_neighbours_can_be_made() -> None:
    """The cases above fail by what they say, not by something else."""
    access, positions = access_of((gather(ROWS), at(N)))
    mask = tile((3,), BOOL)
    assert Load(operands=(X, *positions, mask, tile()), access=access, masked=True, filled=True).result.tile.shape == (
        3,
    )
    assert Store(operands=(OUT, tile((4,))), access=access_of((whole(4),))[0]).results == ()
    assert fold((N, tile()), (tile(),), N, N, tile())().result.type == TileType((), F32)
    assert func("f", (), (), lambda b: None).loc is not UNKNOWN
