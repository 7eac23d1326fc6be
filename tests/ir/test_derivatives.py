from tests.ir.custom import product_rule
from tests.ir.funcs import assert_same, edges, evaluate
from tests.ir.test_compute import rejected, value
from tilekern.ir.core import Block, Builder, Value
from tilekern.ir.derivatives import Custom, Stop
from tilekern.ir.types import BF16, F32, I32, TileType


def test_a_stop_is_its_operand() -> None:
    x = edges(BF16)
    assert_same(evaluate(Stop, x), x)
    rejected(r"stop_gradient does not accept i32\[2\]", Stop, value(dtype=I32))


def test_a_custom_derivative_is_its_first_operand() -> None:
    x = edges(BF16)
    assert_same(evaluate(Custom, x, x[::-1]), x)
    rejected(r"custom_derivative does not accept i32\[2\]", Custom, value(dtype=I32))


def test_a_rule_takes_operands_and_tangents_and_yields_a_tangent() -> None:
    rule, x, n = product_rule(Builder()), value(()), value((), I32)
    op = Custom(operands=(x, x), rule=rule)
    assert op.moving == (1,) and op.copy((x, x)).rule is rule and op.regions == ()
    assert Custom(operands=(x, n, x)).moving == (2,)
    rejected("a rule takes the operands, and their tangents", Custom, x, x, x, rule=rule)
    rejected("a rule takes the operands, and their tangents", Custom, x, n, rule=rule)
    rejected("a rule yields the tangent of the result", Custom, x, x, rule=Block(rule.args, (), ()))
    rejected("the rule of a custom_derivative is a block", Custom, x, x, rule="mul")
    rejected("a custom_derivative has one rule", Custom, x, x, regions=(rule, rule))


def test_a_rule_uses_its_arguments_alone() -> None:
    x, outside = value(()), Value(TileType((), F32))
    rule = product_rule(Builder())
    rejected("a rule uses its arguments alone", Custom, x, x, rule=Block(rule.args, rule.ops, (outside,)))
    wrong = rule.ops[0].copy((outside, outside))
    rejected("a rule uses its arguments alone", Custom, x, x, rule=Block(rule.args, (wrong,), wrong.results))
