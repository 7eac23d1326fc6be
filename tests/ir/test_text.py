import gc
import re
import time
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ir.funcs import EXAMPLES, constants, every_op, funcs, matmul
from tilekern.errors import ParseError
from tilekern.ir import text as text_module
from tilekern.ir.core import Axis, Block, Func, Op, Value
from tilekern.ir.elementwise import TABLE
from tilekern.ir.marks import without_unproved
from tilekern.ir.memory import Access
from tilekern.ir.parse import OPS, parse
from tilekern.ir.text import to_text
from tilekern.ir.types import DTYPES, TileType
from tilekern.ir.verify import verify
from tilekern.source import UNKNOWN

examples = pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)


def structure(func: Func, locations: bool) -> Any:
    """All that makes up a Func, with numbers for values: names are hints, and stay out."""
    numbers: dict[Value, int] = {}

    def number(values: tuple[Value, ...]) -> Any:
        return tuple((numbers.setdefault(v, len(numbers)), v.type) for v in values)

    def plain(value: Any) -> Any:
        if isinstance(value, Block):
            return block_of(value)
        return (value.shape, value.dtype, value.tobytes()) if isinstance(value, np.ndarray) else value

    def op_of(op: Op) -> Any:
        own = [f.name for f in fields(op) if f.name not in ("operands", "regions", "hint", "loc", "results")]
        loc = op.loc if locations else UNKNOWN
        values = number(op.operands), tuple(block_of(r) for r in op.regions), number(op.results)
        return type(op), [(name, plain(getattr(op, name))) for name in own], values, loc

    def block_of(block: Block) -> Any:
        return number(block.args), [op_of(op) for op in block.ops], number(block.results)

    return func.name, number(func.params), func.axes, block_of(func.body), func.loc if locations else UNKNOWN


def assert_round_trip(func: Func) -> None:
    proved = without_unproved(func)
    for locations in (False, True):
        again = parse(to_text(func, locations=locations))
        assert to_text(again, locations=locations) == to_text(proved, locations=locations)
        assert structure(again, locations) == structure(proved, locations)
    assert to_text(again) == to_text(proved)


@examples
def test_examples_round_trip(example: Any) -> None:
    func = example()
    verify(func)
    assert_round_trip(func)
    assert to_text(example()) == to_text(func) == str(func), "two equal Funcs print equal"


@given(funcs())
def test_random_funcs_round_trip(func: Func) -> None:
    verify(func)
    assert_round_trip(func)


def test_the_round_trip_covers_every_op_and_every_attribute() -> None:
    ops = list(every_op().walk())
    assert {type(op) for op in ops} == set(OPS.values())
    for kind in OPS.values():
        for f in fields(kind):
            if f.init and f.name not in ("operands", "regions", "hint", "loc"):
                assert any(type(op) is kind and getattr(op, f.name) != f.default for op in ops), (kind, f.name)
    assert not set(OPS) & set(TABLE), "an elementwise op prints as its function"


@given(constants(), st.integers(1, 4))
def test_constants_are_exact(constant: Any, listed: int) -> None:
    func = Func("f", (), (), Block((), (constant,), ()))
    limit, text_module._LISTED = text_module._LISTED, listed
    try:
        assert_round_trip(func)
    finally:
        text_module._LISTED = limit


@pytest.mark.parametrize("name", DTYPES)
def test_special_numbers_are_exact(name: str) -> None:
    """Bit by bit: a float's NaN may have another sign and a payload, as that of `inf - inf` on x86 has."""
    dtype = DTYPES[name]
    if name[0] in "fb" and name != "bool":
        with np.errstate(all="ignore"):
            array = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1.1, 1e-7, 3e38]).astype(dtype)
        every_bit = np.frombuffer(b"\xff" * dtype.itemsize, dtype)
        arrays = [array, every_bit, *array[:, None], *(np.array(x) for x in (*array, *every_bit))]
    else:
        limits = (0, 1) if name == "bool" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        arrays = [np.array(limits, dtype)]
    for array in arrays:
        constant = OPS["constant"](array=array, shape=array.shape)  # pyright: ignore[reportCallIssue] -- by name
        text = to_text(Func("f", (), (), Block((), (constant,), ())))
        (again,) = parse(text).body.ops
        assert again.array.shape == array.shape and again.array.tobytes() == array.tobytes()
        assert to_text(Func("f", (), (), Block((), (again,), ()))) == text


MATMUL = """\
func @matmul(%x: ref<bf16[50, 70], in>, %w: ref<bf16[70, 35], in>, %out: ref<bf16[50, 35], out>) {
  grid %i in i[50 by 16], %j in j[35 by 8]
  %zero = constant 0.0 : f32[16, 8]
  %start = constant 0 : i32[]
  %stop = constant 70 : i32[]
  %state = fold %k in k[70 by 32] from %start to %stop with %c = %zero do {
    %0 = load %x[16*%i +: 16, 32*%k +: 32] : bf16[16, 32]
    %1 = load %w[32*%k +: 32, 8*%j +: 8] : bf16[32, 8]
    %2 = dot(%0, %1) {contract=[[1], [0]]} : f32[16, 8]
    %3 = add(%c, %2) : f32[16, 8]
    yield %3
  } : f32[16, 8]
  %4 = convert(%state) : bf16[16, 8]
  store %4 to %out[16*%i +: 16, 8*%j +: 8]
}
"""


def test_golden() -> None:
    assert to_text(matmul()) == MATMUL


def test_golden_of_each_form() -> None:
    text = to_text(every_op(), locations=True)
    for line in (
        'func @"<lambda>"(%x: ref<f32[7, 9], in>, %an_output: ref<f32[7], out>, %tally: ref<i32[7], zeros>) {',
        '%a = load %x[8*%i - 3*%i - 5 +: 8, -%i + 2!] : f32[8] @ "/home/user/kernels.py":1:4-20 in kernel',
        "%a_1_1 = reshape(%0) : f32[24]",
        '{contract=[[1], [1]], batch=[[0], [0]], precision="bf16x3"} : f32[1]',
        "constant [inf, -inf, nan, -0.0] : f16[1, 4]",
        "%x_1.0, %x_1.1 = while(%",
        'in "an axis"[9 by 4] from %i to %',
        "reverse with %c = %",
        " do (%",
        "to %an_output[8*%i +: 8] mask %",
        "gather(%",
        " as [3, 3, 7][0 +: 3!, gather(%",
        "along(%",
        ", 2)!",
        " fill %",
    ):
        assert line in text, f"{line}\n{text}"


def test_hints_never_clash() -> None:
    text = to_text(every_op())
    defined = re.findall(r"^ *(%[\w.]+(?:, %[\w.]+)*) = ", text, re.MULTILINE)
    names = [name for group in defined for name in group.split(", ")]
    assert len(names) == len(set(names)) > 20


ERRORS = {
    "expected the end of the text, got }": (MATMUL + "}", 16),
    "expected a word, got 5": (MATMUL.replace("%4 = convert", "%4 = 5"), 13),
    "%zero is defined twice": (MATMUL.replace("%start =", "%zero =", 1), 4),
    "%3 is not defined here": (MATMUL.replace("convert(%state)", "convert(%3)"), 13),
    "%k is not defined here": (MATMUL.replace("store %4 to %out[16*%i", "store %4 to %out[16*%k"), 14),
    "no op is named addd": (MATMUL.replace("add(", "addd("), 10),
    "no dtype is named b16": (MATMUL.replace(": bf16[32, 8]", ": b16[32, 8]"), 8),
    "dot has no attribute contrakt": (MATMUL.replace("{contract", "{contrakt"), 9),
    "missing 1 required keyword-only argument: 'contract'": (MATMUL.replace("{contract=[[1], [0]]}", ""), 9),
    "dot gives f32[16, 8]": (MATMUL.replace("[0]]} : f32[16, 8]", "[0]]} : f32[16, 9]"), 9),
    "add takes 2 operands, got 1": (MATMUL.replace("add(%c, %2)", "add(%c)"), 10),
    "store of bf16[16, 8] to an access of bf16[16, 9]": (MATMUL.replace("8*%j +: 8]\n}", "8*%j +: 9]\n}"), 14),
    "1 names for 0 results": (MATMUL.replace("store %4", "%5 = store %4"), 14),
    "these are no elements of i32[]": (MATMUL.replace("constant 70", "constant 70.0"), 5),
    "expected a number behind -": (MATMUL.replace("constant 70", "constant -true"), 5),
    "expected an integer, got 1e5": (MATMUL.replace("by 32", "by 1e5"), 6),
    "expected one of": (MATMUL.replace("in>", "inn>"), 1),
    "expected a value, got the end of the text": ("func @f(", 1),
    "at most 100 digits": (MATMUL.replace("constant 70", f"constant 7{'0' * 5000}"), 5),
    "number of at most 100 digits, got one of 5000": (MATMUL.replace("by 32", f"by {'9' * 5000}"), 6),
    "dims of at least 0": (MATMUL.replace("bf16[70, 35], in", "bf16[70, -35], in"), 1),
    "fewer than 2**62 elements": (MATMUL.replace("bf16[70, 35], in", f"bf16[{2**62}, 2], in"), 1),
    "blocks of at least 1, got 50 by 0": (MATMUL.replace("[50 by 16]", "[50 by 0]"), 2),
    "expected contract of type": (MATMUL.replace("[1], [0]", "[1.0], [0]"), 9),
    "cannot reshape array of size 2": (MATMUL.replace("70 : i32[]", "[0x3c003c00] : f16[1]"), 5),
    "these are no elements of i32[1]": (MATMUL.replace("70 : i32[]", "[0x05000000] : i32[1]"), 5),
    "a bool is the byte 0 or 1": (MATMUL.replace("70 : i32[]", "0x0002 : bool[2]"), 5),
    "at most 64 blocks or lists": (MATMUL.replace("[[1]", "[" * 2000 + "[1]"), 9),
    "at most 64 blocks or lists inside": (MATMUL.replace("constant 70", "constant " + "- " * 2000 + "70"), 5),
    "inputs stand before outputs": ("\nfunc @f(%o: ref<f32[9], out>, %x: ref<f32[9], in>) {\n}", 2),
    "a Func yields nothing": ("func @f(%x: ref<f32[9], in>) {\n  grid %i in i[3 by 1]\n  yield %i\n}", 1),
    "at most 64 blocks or lists inside each other": ("func @f() {\n" + "hoist() do {\n" * 2000, 66),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_say_the_line(message: str) -> None:
    text, line = ERRORS[message]
    with pytest.raises(ParseError) as caught:
        parse(text)
    assert f"line {line}: " in caught.value.summary and message in caught.value.summary
    assert caught.value.loc.line == line
    assert text.splitlines()[line - 1] in str(caught.value) or line > text.count("\n"), "the line is shown"


TEXTS = [to_text(example(), locations=True) for example in EXAMPLES.values()]


@given(st.data())
def test_a_broken_text_gives_a_parse_error_or_another_func(data: Any) -> None:
    text = data.draw(st.sampled_from(TEXTS))
    words = re.split(r"(\s+|\b)", text)
    at = data.draw(st.integers(0, len(words) - 1))
    words[at] = data.draw(st.sampled_from(["", "%", "{", "]", "none", "-1", '"', "%i", "f32", "[]", "1.5", *words]))
    try:
        func = parse("".join(words))
    except ParseError as error:
        assert 1 <= error.loc.line <= text.count("\n") + 1
    else:
        assert to_text(parse(to_text(func))) == to_text(func)


LONG = {
    "terms": lambda n: "%0 = load %x[{}] : f32[]".format(" + ".join(f"{k}*%i" for k in range(1, n))),
    "values": lambda n: (
        "\n".join(f"%{k} = constant {k} : i32[]" for k in range(n))
        + "\n%a = load %x[{}] : f32[]".format(" + ".join(f"%{k}" for k in range(n)))
    ),
    "regions": lambda n: "\n".join(
        f"%h{k} = switch(%i) do {{ %c{k} = constant 0 : i32[] yield %c{k} }} : i32[]" for k in range(n)
    ),
    "quotes": lambda n: "x \\" + '"\\' * n,
}


@pytest.mark.parametrize("kind", LONG)
@pytest.mark.slow
def test_reading_and_writing_takes_linear_time(kind: str) -> None:
    def seconds(n: int) -> float:
        text = f"func @f(%x: ref<f32[9], in>) {{ grid %i in i[3 by 1]\n{LONG[kind](n)}\n}}"
        begin = time.process_time()
        try:
            to_text(parse(text))
        except ParseError as error:
            assert kind == "quotes" and error.loc.line == 2
        return time.process_time() - begin

    gc.disable()  # a collection takes as long as the process has objects
    try:
        few, many = (min(seconds(n) for _ in range(3)) for n in (3000, 12000))
    finally:
        gc.enable()
    assert many < 8 * few + 0.3, "four times the text"


def test_comments_are_left_out() -> None:
    assert to_text(parse(MATMUL.replace("{\n", "{ # a comment %x\n"))) == MATMUL


def test_an_attribute_without_a_text_form_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="Axis"):
        text_module._literal(Axis("i", 1))


def test_access_of_one_value_twice_keeps_its_meaning() -> None:
    op = next(op for op in parse(to_text(every_op())).walk() if op.name == "load")
    assert isinstance(op, OPS["load"]) and isinstance(op.access, Access)
    assert [(t.operand, t.stride) for t in op.access.dims[0].position.terms] == [(0, 8), (0, -3)]
    assert op.result.type == TileType((8,), DTYPES["f32"])
