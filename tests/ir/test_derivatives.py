from tests.ir.funcs import assert_same, edges, evaluate
from tests.ir.test_compute import rejected, value
from tilekern.ir.derivatives import Stop
from tilekern.ir.types import BF16, I32


def test_a_stop_is_its_operand() -> None:
    x = edges(BF16)
    assert_same(evaluate(Stop, x), x)
    rejected(r"stop_gradient does not accept i32\[2\]", Stop, value(dtype=I32))
