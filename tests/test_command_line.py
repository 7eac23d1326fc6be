"""`python -m tilekern`: what it prints, and its exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import tilekern
from tilekern.command_line import BAD_INPUT, NOTHING_PROVED, OK, WRONG, main
from tilekern.command_line.arguments import statics, types
from tilekern.command_line.shows import coloured
from tilekern.errors import ArgumentError
from tilekern.kernel.tuned import Entry, Key
from tilekern.testing.fuzz import worker

MATMUL = "tilekern.kernels.matmul:matmul"
KERNELS = """
import jax, jax.numpy as jnp, tilekern as tk

@tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
def double(x, out, *, block: tk.Block = 8):
    i = tk.parallel(x.shape[0], block)
    out[i] = x[i] * 2

@tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
def never(x, out):
    raise ValueError("I take nothing")

@tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
def slow_by_default(x, out, *, block: tk.Block = 1):
    i = tk.parallel(x.shape[0], block)
    if block > 1:
        out[i] = x[i] * 2
    else:
        out[i] = x[i] * 2 + 0 * tk.fold(tk.serial(500, 1), lambda _, y: jnp.sin(y), x[i])

def twice(x):
    return x * 2

def thrice(x):
    return x * 3
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_kernels.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)
    return "my_kernels.py"


def run(*arguments: str) -> int:
    return main(arguments)


def test_targets_says_what_runs_compiles_and_is_interpreted(capsys: Any) -> None:
    assert run("targets") == OK
    assert "cpu:xla" in capsys.readouterr().out
    assert run("targets", "--json") == OK
    found = {row["target"]: row for row in json.loads(capsys.readouterr().out)}
    assert found["cpu:xla"]["runs"]
    assert found["tpu:v5e"]["interprets"]


def test_targets_says_what_to_install(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run("targets") == OK
    shown = capsys.readouterr().out
    assert all(f"pip install 'tilekern[{extra}]'" in shown for extra in ("cpu", "cuda", "tpu"))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([], "func @matmul"),
        (["--static", "transpose_rhs=True", "--static", "block_m=16"], "16 by 16"),
        (["--target", "cpu:xla"], "stablehlo"),
        (["--target", "cpu:xla", "--what", "plan"], "program"),
        (["--target", "cpu:xla", "--what", "asm"], "HloModule"),
        (["--target", "cpu:xla", "--what", "resources"], "scratch_bytes: 0"),
        (["--target", "tpu:v5e", "--what", "plan"], "loop"),
    ],
)
def test_show(options: list[str], text: str, capsys: Any) -> None:
    assert run("show", MATMUL, "--shapes", "f32[16, 16], bf16[16,16]".replace("bf16", "f32"), *options) == OK
    assert text in capsys.readouterr().out


def test_show_takes_64_bits_and_prints_json(capsys: Any) -> None:
    assert run("show", MATMUL, "--shapes", "f64[8,8],float64[8,8]", "--json") == OK
    assert "f64[8, 8]" in json.loads(capsys.readouterr().out)["text"]


def test_show_works_on_ops_and_on_users_files(user_module: str, capsys: Any) -> None:
    assert run("show", "tilekern.kernels.softmax:softmax", "--shapes", "f32[4,8]") == OK
    assert "func @softmax" in capsys.readouterr().out
    assert run("show", f"{user_module}:double", "--shapes", "i32[5]") == OK
    assert run("show", "my_kernels:double", "--shapes", "i32[5]") == OK


def test_colours_leave_the_text() -> None:
    import re

    text = "func @f(%x: ref<f32[3], in>) { # here\n  %0 = load %x[0 +: 3!] : f32[3]\n}"
    assert re.sub(r"\x1b\[\d+m", "", coloured(text)) == text
    assert "\x1b[36m%0\x1b[0m" in coloured(text)


def test_check_passes_and_fails(user_module: str, capsys: Any) -> None:
    options = ["--targets", "cpu:xla", "--examples", "4"]
    assert run("check", "my_kernels:double", "--reference", "my_kernels:twice", *options) == OK
    assert "double: 4 calls" in capsys.readouterr().out
    assert run("check", "my_kernels:double", "--reference", "my_kernels:thrice", *options, "--json") == WRONG
    found = json.loads(capsys.readouterr().out)
    assert not found["passed"]
    assert "testing.compare(double" in found["script"]
    cases = ["--shapes", "f32[9]", "--shapes", "bf16[3]", "--static", "block=4", "--seed", "3"]
    assert run("check", f"{user_module}:double", *options, *cases, "--json") == OK
    assert json.loads(capsys.readouterr().out)["examples"] == 4


def test_check_says_when_nothing_is_proved(user_module: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run("check", f"{MATMUL}", "--targets", "cuda:sm_90") == NOTHING_PROVED
    assert "needs triton" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "matmul", "--shapes", ""], "no name of a kernel"),
        (["show", "no_such_module:f", "--shapes", ""], "No module named 'no_such_module'"),
        (["show", "my_kernels:no_such_kernel", "--shapes", ""], "one of its kernels: double, never"),
        (["show", "my_kernels:twice", "--shapes", "f32[3]"], "calls no kernel"),
        (["show", "my_kernels:double", "--shapes", "f32[3"], "no types of arrays"),
        (["show", "my_kernels:double", "--shapes", "f33[3]"], "no such dtype"),
        (["show", "my_kernels:double", "--shapes", f"f32[{'9' * 5000}]"], "no types of arrays"),
        (["show", "my_kernels:double", "--shapes", f"f32[{'9' * 18}]"], "too many tiles"),
        (["show", "a\0b:double", "--shapes", ""], "cannot be imported"),
        (["show", "../../etc/passwd.py:f", "--shapes", ""], "cannot be imported"),
        (["show", "my_kernels:double", "--shapes", "f32[3]", "--static", "block"], "no static argument"),
        (["show", "my_kernels:double", "--shapes", "f32[3]", "--target", "gpu"], "no such target"),
        (["show", "my_kernels:double", "--shapes", "f32[3]", "--what", "asm", "--language", "ptx"], "gives no ptx"),
        (["check", "my_kernels:never", "--targets", "cpu:xla"], "I take nothing"),
        (["fuzz", "--minutes", "-1"], "minutes > 0"),
        (["fuzz", "--minutes", "1", "--targets", "gpu"], "no such target"),
        (["fuzz", "--minutes", "1", "--resume", "--out", "nowhere"], "no run to resume"),
    ],
)
def test_wrong_input_is_an_error_with_a_remedy(
    user_module: str, arguments: list[str], message: str, capsys: Any
) -> None:
    assert main(arguments) == BAD_INPUT
    shown = capsys.readouterr().err
    assert message in shown
    assert "expected:" in shown


def test_shapes_and_static_arguments() -> None:
    assert [None if t is None else (t.shape, str(t.dtype)) for t in types(" f32[ 2, 3 ],None, i32[]")] == [
        ((2, 3), "float32"),
        None,
        ((), "int32"),
    ]
    assert statics(["a=1", "b=(2, 3)", "c=text", "d="]) == {"a": 1, "b": (2, 3), "c": "text", "d": ""}


@given(text=st.text(st.characters(), max_size=12) | st.text("f32[1,] None\n\0()", max_size=24))
@example(text="(" * 10_000)
@example(text="9" * 10_000)
@example(text="__import__('os').abort()")
def test_no_text_runs_or_crashes(text: str) -> None:
    """Types are types, or an error of ours; static arguments are literals, or the text itself."""
    with contextlib.suppress(ArgumentError):
        assert all(t is None or t.dtype for t in types(text))
    literals = (str, bytes, int, float, complex, tuple, list, dict, set, frozenset, type(None), type(...))
    assert isinstance(statics([f"a={text}"])["a"], literals)


def test_as_a_process_it_shows_examples() -> None:
    root = str(Path(tilekern.__file__).parents[1])
    run = subprocess.run(
        [sys.executable, "-m", "tilekern", "--help"],
        env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (run.returncode, "exit codes" in run.stdout) == (OK, True)


# --- the fuzzer -----------------------------------------------------------------------------------------------------


def test_fuzz_runs_and_resumes(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(tilekern.__file__).parents[1]))
    options = ["fuzz", "--minutes", "0.03", "--targets", "orders,text", "--out", str(tmp_path), "--json"]
    assert run(*options) == OK
    first = json.loads(capsys.readouterr().out)["programs"]
    assert set(first) <= {"orders", "text"}
    assert sum(first.values()) > 0
    assert run(*options, "--resume") == OK
    assert sum(json.loads(capsys.readouterr().out)["programs"].values()) > sum(first.values())
    assert worker.State.load(tmp_path / "state.json").current is None


# --- explain ----------------------------------------------------------------------------------------------------------


def test_explain_says_what_lines_became(user_module: str, capsys: Any) -> None:
    pytest.importorskip("llvmlite", reason="needs llvmlite")
    call = ("explain", f"{user_module}:double", "--shapes", "f32[100]", "--target", "cpu:llvm", "--budget", "0")
    assert run(*call) == OK
    text = capsys.readouterr().out
    assert "double on cpu:llvm" in text and "out[i] = x[i] * 2" in text and "scratch" in text
    assert run(*call, "--json") == OK
    (record,) = json.loads(capsys.readouterr().out)
    assert record["kernel"] == "double" and record["settings"] == {"block": 8} and record["estimate"]["seconds"] > 0


def test_explain_writes_a_page(user_module: str, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("llvmlite", reason="needs llvmlite")
    call = ("explain", f"{user_module}:double", "--shapes", "f32[100]", "--target", "cpu:llvm", "--budget", "0")
    assert run(*call, "--html", str(tmp_path / "page.html")) == OK
    assert "out[i] = x[i] * 2" in (tmp_path / "page.html").read_text()
    capsys.readouterr()
    assert run(*call, "--html", str(tmp_path / "missing" / "page.html")) == BAD_INPUT
    assert "the page cannot be written" in capsys.readouterr().err


def test_a_kernel_that_all_targets_refuse_is_bad_input(user_module: str, capsys: Any) -> None:
    assert run("explain", f"{user_module}:double", "--shapes", "f32[100]", "--target", "cpu:xla") == BAD_INPUT
    assert "refused: EstimateError: there is no model of programs of the portable backend" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--target": "cuda:sm_1"}, "there is no such target"),
        ({"--target": ","}, "there is nothing to explain"),
        ({"--budget": "-1"}, "there is nothing to explain"),
        ({"--budget": "nan"}, "there is nothing to explain"),
        ({"--shapes": "f32[100"}, "these are no types of arrays"),
        ({"--extent": "x"}, "this is no static argument"),
        ({"--extent": "x=many"}, "this is no extent"),
        ({"--extent": "y=3"}, "double has no input of this name"),
    ],
)
def test_explain_refuses_bad_input(changes: dict[str, str], message: str, user_module: str, capsys: Any) -> None:
    pytest.importorskip("llvmlite", reason="needs llvmlite")
    options = {"--shapes": "f32[100]", "--target": "cpu:llvm", "--budget": "0"} | changes
    assert run("explain", f"{user_module}:double", *(word for pair in options.items() for word in pair)) == BAD_INPUT
    assert message in capsys.readouterr().err


def test_a_function_without_a_kernel_is_refused(user_module: str, capsys: Any) -> None:
    assert run("explain", f"{user_module}:twice", "--shapes", "f32[100]", "--target", "cpu:xla") == BAD_INPUT
    assert "calls no kernel" in capsys.readouterr().err


# --- tune and tuned ---------------------------------------------------------------------------------------------------


def test_tune_prints_a_table_and_adds_to_a_file(user_module: str, tmp_path: Path, capsys: Any) -> None:
    target = ("--target", "cpu:llvm", "--budget", "1")
    command = ("tune", f"{user_module}:slow_by_default", "--shapes", "f32[512]", *target, "--out", "tuned.json")
    assert run(*command, "--reference", f"{user_module}:twice") == OK
    assert "slow_by_default" in capsys.readouterr().out
    (entry,) = tilekern.tuned(tmp_path / "tuned.json").entries
    assert (entry.key.kernel, entry.by) == ("slow_by_default", "measurement")
    assert entry.confidence is not None and entry.confidence >= 0.95


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shapes", "f32[8]", "--budget", "0"), "no time to tune"),
        (("--shapes", "f32[8"), "no types of arrays"),
        (("--shapes", "f32[8]", "--target", "cuda:sm_1"), "no such target"),
        (("--shapes", "f32[8]", "--out", "missing/tuned.json"), "cannot be written"),
        (("--shapes", "f32[8]", "--out", "my_kernels.py"), "is not a file of tuned blocks"),
    ],
)
def test_tune_refuses_wrong_input(user_module: str, arguments: tuple[str, ...], message: str, capsys: Any) -> None:
    assert run("tune", f"{user_module}:double", *arguments) == BAD_INPUT
    assert message in capsys.readouterr().err


def test_tune_refuses_a_reference_for_what_is_no_kernel(user_module: str, capsys: Any) -> None:
    assert run("tune", f"{user_module}:twice", "--shapes", "f32[8]", "--gradient") == BAD_INPUT
    assert "is no kernel" in capsys.readouterr().err
    assert run("tune", f"{user_module}:twice", "--shapes", "f32[8]") == BAD_INPUT
    assert "calls no kernel" in capsys.readouterr().err


def test_tuned_files_are_merged_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    key = Key("double", "0123", False, (("x[1]", 64),), 8, (), "cpu:llvm", "", ())
    for name, block in (("a.json", 8), ("b.json", 16)):
        tilekern.Tuned((Entry(key, (("block", block),), "estimate", 1.0, 2.0, None, "2026-11-26"),)).save(name)
    assert run("tuned", "diff", "a.json", "a.json") == OK
    assert run("tuned", "diff", "a.json", "b.json") == WRONG
    assert "double on cpu:llvm, x[1] ≤ 64\n  - {'block': 8}\n  + {'block': 16}" in capsys.readouterr().out
    assert run("tuned", "merge", "a.json", "b.json", "--out", "all.json") == OK
    assert run("tuned", "diff", "all.json", "b.json") == OK
    assert run("tuned", "merge", "a.json") == BAD_INPUT
    assert run("tuned", "diff", "a.json") == BAD_INPUT
