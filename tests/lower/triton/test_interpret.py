"""The interpreter around a program: buffers, checks of memory, errors, and the child process."""

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lower.triton.sources import LOC, program, result, run
from tilekern.errors import (
    DependencyError,
    DeviceAssertionError,
    InterpreterError,
    OutOfBoundsError,
    UnwrittenError,
    WriteConflictError,
)
from tilekern.ir.types import DTYPES
from tilekern.lower.triton import interpret as module
from tilekern.lower.triton.interpret import interpret
from tilekern.lower.triton.program import Argument, Descriptor, Program
from tilekern.testing import arrays

pytest.importorskip("triton", reason="needs triton")

X = np.arange(100, dtype=np.float32)
COPY = """
    i = tl.program_id(0) * 32 + tl.arange(0, 32)
    x = tl.load(x0 + i, mask=i < 100)
    tl.store(y0 + i, x, mask=i < 100)
"""


def copy(body: str = COPY) -> Program:
    return program(body, [X], [result([100], "f32")], programs=4)


# --- buffers -------------------------------------------------------------------------------------------------------


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data(), length=st.integers(1, 70))
def test_every_dtype_goes_in_and_out_unchanged(dtype: str, data: st.DataObject, length: int) -> None:
    x = data.draw(arrays(DTYPES[dtype], (length,)))
    body = f"""
        i = tl.program_id(0) * 32 + tl.arange(0, 32)
        tl.store(y0 + i, tl.load(x0 + i, mask=i < {length}), mask=i < {length})
    """
    (y,) = run(body, [x], [result([length], dtype)], programs=-(-length // 32))
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y, x)


@pytest.mark.smoke
def test_a_program_runs() -> None:
    (y,) = interpret(copy(), [X])
    np.testing.assert_array_equal(y, X)


@pytest.mark.parametrize("order", ["forward", "reverse", 0, 1])
def test_programs_run_in_any_order(order: module.Order) -> None:
    body = "tl.store(y0 + tl.program_id(0), tl.atomic_add(y1, 1))"
    turns, count = interpret(
        program(body, [], [result([8], "i32"), result([], "i32", zeroed=True)], programs=8), [], order=order
    )
    assert count == 8
    expected = {"forward": list(range(8)), "reverse": list(range(7, -1, -1))}
    if isinstance(order, str):
        assert turns.tolist() == expected[order]
    else:
        assert sorted(turns) == expected["forward"] and turns.tolist() not in expected.values()


def test_operands_are_inputs_and_constants_and_may_repeat() -> None:
    weights = np.full(1, 10, np.float32)
    p = program("tl.store(y0, tl.load(x0) + tl.load(x1) * tl.load(x2))", [X] * 3, [result([1], "f32")])
    p = replace(p, operands=(0, 1, 0), constants=(weights,))
    (y,) = interpret(p, [np.full(1, 2, np.float32)])
    assert y == 2 + 10 * 2


def test_an_aliased_result_starts_as_its_operand_which_stays_as_it_is() -> None:
    x = np.arange(4, dtype=np.float32)
    body = """
        tl.store(y0, tl.load(x1) + 5)
        tl.store(y0 + 1, tl.load(x0 + 0))
        tl.debug_barrier()
        tl.store(y0 + 2, tl.load(x1 + 0))
    """
    p = replace(program(body, [x, x], [result([4], "f32", alias=1)]), operands=(0, 0))
    (y,) = interpret(p, [x])
    assert y.tolist() == [5, 0, 5, 3]  # x1 is the result's memory, x0 another copy of the same array
    assert x.tolist() == [0, 1, 2, 3]


def test_partial_sums_are_added_in_the_dtype_of_the_buffer() -> None:
    y, z = run(
        "p = tl.program_id(0)\ntl.store(y0 + p, p * 100 + 0.25)\ntl.store(y1 + p, (p * 100).to(tl.int32))",
        [],
        [result([4, 1], "f32", "bf16", partial_sums=True), result([4], "i32", partial_sums=True)],
        programs=4,
    )
    assert y.dtype == DTYPES["bf16"] and y == np.asarray([601], np.float32).astype(DTYPES["bf16"])
    assert z == 600


def test_a_result_has_its_final_dtype() -> None:
    (y,) = run("tl.store(y0, tl.full((), 3, tl.int8))", [], [result([], "i8", "bool")])
    assert y.dtype == np.bool_ and y


def test_a_zeroed_result_may_stay_so_and_without_programs_nothing_runs() -> None:
    (y,) = run("tl.store(y0, 1.0)", [], [result([3], "f32", zeroed=True)], programs=0)
    assert y.tolist() == [0, 0, 0]
    (y,) = run("tl.store(y0, 1.0)", [], [result([0, 3], "f32")], programs=0)
    assert y.shape == (0, 3)


@given(data=st.data(), rows=st.integers(1, 40), heads=st.integers(1, 3))
def test_a_descriptor_moves_boxes_of_a_permuted_array(data: st.DataObject, rows: int, heads: int) -> None:
    """A BTNH array seen as [B, N, T, H]: reads outside give 0, writes outside are dropped."""
    x = data.draw(arrays(np.float32, (2, rows, heads, 8)))
    seen = Descriptor((2, heads, rows, 8), (rows * heads * 8, 8, heads * 8, 1), (1, 1, 16, 8))
    body = """
        box = x0.load([tl.program_id(0) // HEADS, tl.program_id(0) % HEADS, 16, 0])
        first = x0.load([tl.program_id(0) // HEADS, tl.program_id(0) % HEADS, 0, 0])
        outside = tl.sum(tl.sum(box, 3), 2)[:, :, None, None]
        y0.store([tl.program_id(0) // HEADS, tl.program_id(0) % HEADS, 0, 0], first + outside)
    """.replace("HEADS", str(heads))
    p = program(body, [x], [result(x.shape, "f32", zeroed=True)], programs=2 * heads)
    p = replace(p, arguments=tuple(Argument(a.name, a.dtype, seen) for a in p.arguments))
    (y,) = interpret(p, [x])
    expected = np.zeros_like(x)
    expected[:, :16] = x[:, :16] + x[:, 16:32].sum((1, 3), keepdims=True)
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-5)


def test_a_descriptor_must_be_aligned() -> None:
    p = program("y0.store([0, 0], x0.load([0, 0]))", [X], [result([100], "f32")])
    bad = Descriptor((10, 10), (10, 1), (8, 8))
    p = replace(p, arguments=tuple(Argument(a.name, a.dtype, bad) for a in p.arguments))
    with pytest.raises(InterpreterError, match="16-byte aligned"):
        interpret(p, [X])


# --- checks of memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "summary", "got"),
    [
        (
            "tl.store(y0, tl.load(x0 + 100))",
            "a load is outside x0",
            "element=100 in lane [0], the first of 1 wrong ones",
        ),
        ("tl.store(y0, tl.load(x0 - 1))", "a load is outside x0", "element=-1 in lane [0]"),
        ("tl.store(y0 + 100, 1.0)", "a store is outside y0", "element=100 in lane [0]"),
        ("tl.atomic_add(y0 - 1, 1.0)", "an update is outside y0", "element=-1 in lane [0]"),
        (
            "i = tl.arange(0, 64)[:, None] * 2 + tl.arange(0, 2)[None, :]\ntl.store(y0 + i, 0.0)",
            "a store is outside y0",
            "element=100 in lane [50, 0], the first of 28 wrong ones",
        ),
        (
            "i = tl.arange(0, 128)\ntl.store(y0 + i, 0.0, mask=i != 99)",
            "a store is outside y0",
            "element=100 in lane [100], the first of 28 wrong ones",
        ),
        ("i = tl.arange(0, 2)\nx = tl.load(x0 + i * 2000000000)", "a load is outside x0", "element=2000000000"),
        ("tl.store(x0.to(tl.uint64).to(tl.pointer_type(tl.float32)) + y0.to(tl.int64), 0.0)", "no array", "address="),
        ("x = tl.load((x0.to(tl.int64) + 2).to(tl.pointer_type(tl.float32)))", "a load is outside x0", "element=0.5"),
    ],
)
def test_a_lane_outside_is_an_error_that_names_it(body: str, summary: str, got: str) -> None:
    with pytest.raises(OutOfBoundsError) as caught:
        interpret(copy(body), [X])
    assert summary in caught.value.summary and got in caught.value.got
    last = body.splitlines()[-1]
    assert f"of the generated source: {last}" in caught.value.got
    assert caught.value.loc == LOC


@given(length=st.integers(1, 100), shift=st.integers(-3, 3))
def test_a_mask_that_lets_one_lane_out_is_found(length: int, shift: int) -> None:
    body = f"""
        i = tl.program_id(0) * 32 + tl.arange(0, 32)
        tl.store(y0 + i, tl.load(x0 + i, mask=i < {length}), mask=i < {length + shift})
    """
    x = np.zeros(length, np.float32)
    p = program(body, [x], [result([length], "f32")], programs=-(-length // 32))
    if shift == 0 or (shift > 0 and length % 32 == 0):
        interpret(p, [x])
        return
    with pytest.raises(OutOfBoundsError if shift > 0 else UnwrittenError):
        interpret(p, [x])


def test_an_element_that_nobody_stores_is_an_error() -> None:
    with pytest.raises(UnwrittenError, match="element 0 of y0 is never stored") as caught:
        run("i = tl.arange(0, 64)\ntl.store(y0 + i + 1, 0.0)", [], [result([100], "f32")])
    assert "36 of 100 elements" in caught.value.got and caught.value.loc == LOC


def test_programs_do_not_store_the_same_element() -> None:
    with pytest.raises(WriteConflictError, match="two programs store element 3 of y0") as caught:
        run("tl.store(y0 + 3, 1.0)", [], [result([4], "f32", zeroed=True)], programs=2)
    assert "program 1, and program 0 before it" in caught.value.got


def test_a_program_stores_to_results_only() -> None:
    with pytest.raises(WriteConflictError, match="writes to x0"):
        interpret(copy("tl.store(x0, 1.0)"), [X])


def test_a_program_stores_an_element_again_and_sees_what_it_stored() -> None:
    body = "tl.store(y0, 1.0)\ntl.debug_barrier()\nx = tl.load(y0)\ntl.debug_barrier()\ntl.store(y0, x + 1)"
    (y,) = run(body, [], [result([], "f32")])
    assert y == 2


@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_a_program_does_not_see_what_another_one_stores(order: module.Order) -> None:
    body = """
        p = tl.program_id(0)
        tl.store(y0 + p, 1.0)
        tl.store(y1 + p, tl.load(y0 + (1 - p)))
    """
    p = program(body, [], [result([2], "f32"), result([2], "f32")], programs=2)
    assert np.isnan(interpret(p, [], order=order)[1]).all()


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "f8e4m3fn", "f8e5m2", "i32", "u8", "i64"])
def test_poison_stands_where_nothing_is_loaded_or_stored(dtype: str) -> None:
    body = """
        i = tl.arange(0, 4)
        tl.store(y1 + i, tl.load(y0 + i))
        tl.store(y2 + i, tl.load(x0 + i, mask=i < 1))
        tl.store(y0 + i, tl.load(x0 + i))
    """
    x = np.zeros(4, DTYPES[dtype])
    _, unwritten, masked = run(body, [x], [result([4], dtype)] * 3)
    assert (unwritten != x).all() and (masked[1:] != x[1:]).all() and masked[0] == 0


# --- errors --------------------------------------------------------------------------------------------------------


def test_an_error_shows_the_users_line_and_the_generated_one() -> None:
    with pytest.raises(InterpreterError) as caught:
        interpret(copy("x = tl.load(x0)\ny = x & x"), [X])
    assert caught.value.loc == LOC
    assert caught.value.got == "line 9 of the generated source: y = x & x"
    assert "at user.py:7 in scale" in str(caught.value)


def test_an_error_in_a_function_is_at_its_line() -> None:
    functions = """
        @triton.jit
        def bad(x):
            return tl.load(x - 1)
    """
    with pytest.raises(OutOfBoundsError, match=r"a load is outside x0") as caught:
        run("tl.store(y0, bad(x0))", [X], [result([], "f32")], functions=functions)
    assert "line 7 of the generated source: return tl.load(x - 1)" in caught.value.got


def test_text_that_is_no_python_is_an_error() -> None:
    with pytest.raises(InterpreterError, match="SyntaxError") as caught:
        interpret(copy("x = ("), [X])
    assert "of the generated source" in caught.value.got


def test_an_error_of_the_text_as_a_whole_shows_a_traceback() -> None:
    with pytest.raises(InterpreterError, match="KeyError: 'other'") as caught:
        interpret(replace(copy(), name="other"), [X])
    assert "Traceback" in caught.value.got


def test_an_assertion_has_its_message() -> None:
    with pytest.raises(DeviceAssertionError) as caught:
        interpret(copy("tl.device_assert(tl.load(x0 + tl.arange(0, 4)) < 3, 'too large')"), [X])
    assert caught.value.summary == "too large" and caught.value.loc == LOC


def test_prints_go_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    run("tl.device_print('x is', tl.load(x0 + tl.program_id(0)))", [X], [], programs=2)
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["(0,", "0,", "0)", "x", "is:", "[0.]"],
        ["(1,", "0,", "0)", "x", "is:", "[1.]"],
    ]


# --- the process ---------------------------------------------------------------------------------------------------


def pid() -> int:
    """The number of the child process."""
    p = copy("tl.static_assert(False, os.getpid())")
    with pytest.raises(InterpreterError) as caught:
        interpret(replace(p, text=f"import os\n{p.text}"), [X])
    return int(caught.value.summary.split()[-1])


def test_one_process_serves_all_calls_and_its_death_is_an_error_once() -> None:
    first = pid()
    assert pid() == first != os.getpid()
    p = copy()
    with pytest.raises(InterpreterError, match="the interpreter's process died") as caught:
        interpret(replace(p, text=f"import os\nos.write(2, b'last words')\nos._exit(3)\n{p.text}"), [X])
    assert caught.value.got == "exit status 3\nlast words" and caught.value.loc == LOC
    assert pid() != first


def test_a_program_that_does_not_end_is_stopped() -> None:
    first = pid()
    with pytest.raises(InterpreterError, match="the program does not end") as caught:
        interpret(copy("n = tl.load(x0)\nwhile n < 1:\n    n = n * 1"), [X], timeout=0.5)
    assert caught.value.expected == "an end within 0.5 s"
    assert pid() != first


def test_threads_take_turns() -> None:
    results: dict[int, np.ndarray] = {}

    def call(number: int) -> None:
        x = X + number
        (results[number],) = interpret(copy(), [x])

    threads = [threading.Thread(target=call, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((results[n] == X + n).all() for n in range(8)) and len(results) == 8


def test_a_forked_process_has_an_interpreter_of_its_own() -> None:
    code = """
import os
from tests.lower.triton.test_interpret import pid
mine = pid()
if os.fork() == 0:
    print(pid(), flush=True)
else:
    os.wait()
    print(mine, pid())
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    theirs, before, after = done.stdout.split()
    assert theirs != before == after


def test_the_interpreter_goes_when_its_parent_is_killed() -> None:
    """The child ends even while a program loops."""
    code = """
from tests.lower.triton.test_interpret import X, copy, interpret, pid
print(pid(), flush=True)
interpret(copy("n = tl.load(x0)\\nwhile n < 1:\\n    n = n * 1"), [X])
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(child, 0)
        parent.kill()
    for _ in range(100):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        threading.Event().wait(0.05)
    pytest.fail(f"process {child} is still there")


def test_without_triton_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise module.PackageNotFoundError(name)

    monkeypatch.setattr(module, "_child", module._Child())
    monkeypatch.setattr(module, "version", version)
    with pytest.raises(DependencyError, match="Triton is not installed") as caught:
        interpret(copy(), [X])
    assert caught.value.fix == "pip install 'triton>=3.6,<3.10'"


@pytest.mark.parametrize("fault", ["raise OSError('libtriton.so: file too short')", "", "__version__ = '9.9'"])
def test_a_broken_triton_is_an_error_of_ours(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package has the right metadata, but cannot be loaded, or lacks modules."""
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text(fault)
    monkeypatch.syspath_prepend(tmp_path)
    child = module._Child()
    monkeypatch.setattr(module, "_child", child)
    for _ in range(2):
        with pytest.raises(DependencyError, match="Triton's interpreter does not work") as caught:
            interpret(copy(), [X])
        assert caught.value.fix == "pip install 'triton>=3.6,<3.10'"
        assert "Error: " in caught.value.got and "Traceback" not in str(caught.value)
    child.stop()


def test_this_process_never_interprets() -> None:
    assert "TRITON_INTERPRET" not in os.environ
