"""Names, files, messages and formats that look like code reach no program as code, on any backend."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tilekern.errors import ParseError
from tilekern.ir.core import Func
from tilekern.ir.debug import pieces
from tilekern.ir.parse import parse
from tilekern.lower.lowering import lower
from tilekern.lower.target import resolve
from tilekern.passes import pipeline

X = np.arange(8 * 128, dtype=np.float32).reshape(8, 128)
NAMES = [
    "a.py\nopen('ran', 'w')\ndef other():\n    #",
    "\r\0\f\x1a\x0b\x1c\x85\u2028\u2029\x7f",
    '"\'"""\\',
    "%s%n%d {0} {",
    "sort99999999(libdevice.x, maximum) tl.device_assert",
    "größe 😀 \ud800",
    "<lambda>/(x)",
    "first = x:",
    "# -*- coding: utf-7 -*-",
]


def func_of(name: str, debug: bool = True) -> Func:
    """A Func that has a name wherever a text may have one."""
    word, place = json.dumps(name), f"@ {json.dumps(name)}:3:1-2 in {json.dumps(name)}"
    text = json.dumps(name.replace("{", "{{").replace("}", "}}"))[1:-1]
    checks = f"""
      assert(%t) {{message={word}}} {place}
      print(%s, %n) {{format="{text}{{1:>10}}{text} {{0}} {text}"}} {place}
      print() {{format="{text}"}} {place}"""
    return parse(f"""
    func @{word}(%x: ref<f32[8, 128], in>, %o: ref<f32[8, 128], out>) {{
      grid %i in {word}[2 by 1]
      %z = constant 0 : i32[]
      %n = constant 3 : i32[]
      %t = constant true : bool[]
      %a = load %x[4*%i +: 4, 0 +: 128] : f32[4, 128] {place}
      %s = reduce(%a) {{monoid="max", dims=[0, 1]}} : f32[] {place} {checks if debug else ""}
      %r = fold %k in {word}[3 by 1] from %z to %n with %c = %a do {{
        %d = add(%c, %a) : f32[4, 128]
        yield %d
      }} : f32[4, 128] {place}
      store %r to %o[4*%i +: 4, 0 +: 128] {place}
    }} {place}""")


def lowering(name: str, target: str) -> Any:
    return lower(pipeline.run(func_of(name, debug=target != "cpu:llvm")), resolve(target), {})


def shape_of(text: str) -> list[str]:
    """The syntax tree of each statement of a program, with numbers for names and nothing for strings."""
    return [_shape(statement) for statement in ast.parse(text).body]


def _shape(statement: ast.stmt) -> str:
    numbers: dict[str, int] = {}
    for node in ast.walk(statement):
        match node:
            case ast.FunctionDef():
                node.name = ""
            case ast.Constant(value=str()):
                node.value = ""
            case ast.Name(id=name):
                node.id = str(numbers.setdefault(name, len(numbers)))
            case ast.arg(arg=name):
                node.arg = str(numbers.setdefault(name, len(numbers)))
            case _:
                pass
    return ast.dump(statement)


@pytest.mark.parametrize("name", NAMES)
def test_triton_runs_no_names(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton", reason="needs triton")
    harmless, hostile = lowering("harmless", "cuda:sm_90"), lowering(name, "cuda:sm_90")
    assert hostile.text.isascii() and "\r" not in hostile.text
    assert shape_of(hostile.text) == shape_of(harmless.text)
    np.testing.assert_array_equal(hostile.interpret(X)[0], 4 * X)
    assert ("%s%n%d {0} {" in capsys.readouterr().out) == (name == "%s%n%d {0} {")


def test_triton_compiles_no_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="needs triton")
    monkeypatch.chdir(tmp_path)
    compiled = lowering("a.py\nopen('ran', 'w')\ndef other():\n    # %s", "cuda:sm_90").compile()
    assert not (tmp_path / "ran").exists()
    formats = re.findall(r"printfFormat_\d+\[\d+\] = \{([\d, ]+)\}", compiled.asm["ptx"])
    assert formats and all("%%s" in bytes(map(int, found.split(","))).decode() for found in formats)


@given(name=st.text(st.characters(), max_size=12) | st.text(' #"\\\n\r\0%{}x=:', max_size=12))
@example(name="\nx")
@example(name="first")
def test_the_shape_of_triton_source_does_not_depend_on_names(name: str) -> None:
    found = lowering(name, "cuda:sm_90").text
    assert shape_of(found) == shape_of(lowering("harmless", "cuda:sm_90").text)


@pytest.mark.parametrize("target", ["tpu:v5e", "cpu:llvm", "cpu:xla"])
@pytest.mark.parametrize("name", NAMES)
def test_other_programs_hold_no_names_as_code(name: str, target: str) -> None:
    lowered, harmless = lowering(name, target), lowering("harmless", target)
    assert len(lowered.text.split("\n")) == len(harmless.text.split("\n"))
    if target != "cpu:xla":
        assert len(lowered.plan.splitlines()) == len(harmless.plan.splitlines())
    if target.startswith("cpu"):
        np.testing.assert_array_equal(lowered.compile()(X)[0], 4 * X)


@given(name=st.text(st.characters(), max_size=12))
def test_the_text_form_keeps_names(name: str) -> None:
    func = func_of(name)
    text = func_of("harmless")
    assert len(str(func).splitlines()) == len(str(text).splitlines()) and str(func).isascii()
    assert str(parse(str(func))) == str(func) and parse(str(func)).name == name


@pytest.mark.parametrize(
    ("format", "expected"),
    [
        ("", [("", None)]),
        ("a {{}} {} b", [("a {} ", 0), (" b", None)]),
        ("{1:>10}{0!r}", [("", 1), ("", 0)]),
        ("{}{}", [("", 0), ("", 1)]),
    ],
)
def test_pieces_of_a_format(format: str, expected: list[tuple[str, int | None]]) -> None:
    assert list(pieces(format)) == expected


@pytest.mark.parametrize("format", ["{", "{x}", "{0.shape}", "{0} {}", "{:{}}", "{:>99999999}", "{:.1000}", "{3}", "}"])
def test_formats_that_are_none(format: str) -> None:
    with pytest.raises(ParseError, match="format"):
        parse(f"func @f() {{\n%a = constant 0 : i32[]\nprint(%a) {{format={json.dumps(format)}}} }}")


def test_a_tpu_prints_the_values_that_the_format_names() -> None:
    text = lowering("50% of $1 {x}", "tpu:v5e").text
    logs = [line for line in text.splitlines() if "tpu.log" in line]
    assert len(logs) == 2 and "\\\\x241" in logs[0].replace("\\5C", "\\\\")
