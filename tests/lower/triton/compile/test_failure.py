"""The user's view of a failure of Triton."""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path

import pytest

from tests.lower.triton import samples
from tilekern.errors import CompileError
from tilekern.lower.triton.chip import CHIPS
from tilekern.lower.triton.compile.compile_program import compile_program
from tilekern.lower.triton.compile.failure import quiet

pytestmark = pytest.mark.sweep(1)  # all cases: they take little time

pytest.importorskip("triton", reason="needs triton")
HOPPER = CHIPS["cuda:sm_90"]
ASM = "tl.store(out_ptr + i, tl.inline_asm_elementwise('{}', '=r,r', [tl.load(x_ptr + i)], tl.float32, True, {}))"

FAILURES = {
    "front end": ("j = tl.arange(0, 100)", "range must be a power of 2"),
    "library": ("j = tl.sum(tl.load(x_ptr + i), axis=3)", "invalid axis 3"),
    "helper": ("j = half('a')", "can't multiply sequence"),
    "assertion": ("tl.static_assert(1 == 2, 'not one')", "CompileTimeAssertionFailure: not one"),
    "verifier": (ASM.format("mov.b32 $0, $1;", 3), "must be a multiple of the op's packed_element"),
    "assembler": (ASM.format("garbage $0, $1;", 1), "Not a name of any known instruction: 'garbage'"),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tilekern" / "failures"


@pytest.mark.parametrize("kind", FAILURES)
def test_a_failure_shows_both_lines_and_a_file(kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    statement, reason = FAILURES[kind]
    program = samples.failing(statement)
    with pytest.raises(CompileError) as caught:
        compile_program(program, HOPPER)
    error = caught.value
    assert error.__cause__ is not None
    assert error.summary == "Triton cannot compile `failing` for cuda:sm_90"
    assert reason in error.got and len(error.got) < 800
    shown = "line 7 of the generated source: return x * 0.5" if kind == "helper" else f"source: {statement}"
    assert shown in error.got
    assert (error.loc.file, error.loc.line) == (str(samples.USER), 2)
    (dump,) = folder.iterdir()
    assert str(dump) in error.fix
    text = dump.read_text()
    assert program.text in text and reason.removeprefix("CompileTimeAssertionFailure: ") in text
    assert ("======== ptx" in text) == (kind == "assembler")
    assert capsys.readouterr().out == ""


def test_a_pass_that_fails_shows_its_reason() -> None:
    """The passes write to the standard error of the process."""
    body = """
r = tl.arange(0, 128)
acc = tl.zeros((128, 128), tl.float32)
for k in tl.range(0, 4096, 64, warp_specialize=True):
    a = tl.load(x_ptr + r[:, None] * 4096 + k + tl.arange(0, 64)[None, :]).to(tl.bfloat16)
    b = tl.load(x_ptr + r[None, :] * 4096 + k + tl.arange(0, 64)[:, None]).to(tl.bfloat16)
    acc = tl.dot(a, b, acc)
tl.store(out_ptr + r, tl.sum(acc, 1))
"""
    program = samples.program("passes", samples.pointers("x_ptr", "out_ptr"), body)
    with pytest.raises(CompileError, match="detected while processing an MLIR pass pipeline") as caught:
        compile_program(program, HOPPER)
    assert caught.value.loc == program.loc
    assert "nvgpu-warp-specialization" in Path(caught.value.fix.split()[-1]).read_text()


def test_the_dump_lies_elsewhere_where_the_cache_cannot_be_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.parent.write_text("a file where the folder should be")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(CompileError) as caught:
        compile_program(samples.failing("nonsense()"), HOPPER)
    dump = Path(caught.value.fix.split()[-1])
    assert dump.parent == tmp_path and "nonsense" in dump.read_text()


def test_a_failure_is_not_kept() -> None:
    for _ in range(2):
        with pytest.raises(CompileError):
            compile_program(samples.failing("nonsense()"), HOPPER)


def test_quiet_holds_back_what_one_thread_prints(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="failed"), quiet():
        sys.stdout.write("noise")
        thread = threading.Thread(target=lambda: sys.stdout.write("from another thread"))
        thread.start()
        thread.join()
        raise ValueError("failed")
    assert capsys.readouterr().out == "from another thread"
    with quiet():
        sys.stdout.write("a dump that was asked for")
    assert capsys.readouterr().out == "a dump that was asked for"
