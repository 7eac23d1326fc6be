from tests.lower.triton.legalize.meaning import counting, one
from tilekern.ir.compute import Constant, Convert
from tilekern.ir.core import Builder, Op, Value
from tilekern.ir.make import Make
from tilekern.ir.rewrite import Rewriter
from tilekern.ir.types import BF16, F32, I32, TileType


def maker() -> tuple[Make, Rewriter, Op]:
    func, _ = one(Convert, counting((3,), I32), dtype=F32)
    (origin,) = (op for op in func.walk() if isinstance(op, Convert))
    rewriter = Rewriter(lambda op, _: None)
    return Make(rewriter, origin), rewriter, origin


def test_ops_stand_at_the_line_of_the_op_that_they_replace() -> None:
    make, rewriter, origin = maker()
    result = make.of("add", make.lanes((4, 8), 1), 2)
    made = rewriter.definition(result)
    assert made is not None and made.loc == origin.loc
    for operand in made.operands:
        assert (definition := rewriter.definition(operand)) is not None and definition.loc == origin.loc


def test_numbers_are_tiles_of_the_type_of_the_other_operand() -> None:
    make, rewriter, _ = maker()
    x = Value(TileType((4,), BF16))
    for result in (make.of("sub", 1, x), make.of("sub", x, 1), make.select(make.of("lt", x, 0), x, 1)):
        op = rewriter.definition(result)
        assert op is not None
        assert result.tile == x.tile
        (one,) = (d for v in op.operands if isinstance(d := rewriter.definition(v), Constant))
        assert one.array.dtype == BF16 and one.array == 1


def test_nothing_is_made_that_changes_nothing() -> None:
    make, *_ = maker()
    x = Value(TileType((4, 8), I32))
    assert make.convert(x, I32) is make.bitcast(x, I32) is make.reshape(x, (4, 8)) is x
    assert make.transpose(x, (0, 1)) is make.broadcast(x, (4, 8), (0, 1)) is x


def test_known_numbers() -> None:
    make, _, origin = maker()
    five = make.number(5, TileType((4,), I32))
    assert make.known(five) == 5
    assert make.known(make.of("add", five, five)) is None
    assert Make(Builder(), origin).known(five) is None  # which does not know its ops
