"""The user's lines in the debug information of GPU programs."""

from __future__ import annotations

import inspect
import re
import threading
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tilekern as tk
from tests.lower.library import kernels_of
from tests.lower.triton import samples
from tests.lower.triton.samples import USER
from tilekern.kernels.flash_attention import flash_attention
from tilekern.lower.target import resolve
from tilekern.lower.triton.chip import CHIPS
from tilekern.lower.triton.compile import compile_program as compiler
from tilekern.lower.triton.compile import toolchain
from tilekern.lower.triton.compile.compile_program import compile_program, file_name
from tilekern.lower.triton.compile.debug_lines import with_user_lines
from tilekern.lower.triton.ptx.parse import parse
from tilekern.source import UNKNOWN, Loc

triton = pytest.importorskip("triton", reason="needs triton")
HOPPER = CHIPS["cuda:sm_90"]


@tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape[:1], x.dtype))
def energies(x: Any, out: Any, *, rows: tk.Block = 16) -> None:
    """For each row the logarithm of the sum of exponentials."""
    i = tk.parallel(x.shape[0], rows)
    with tk.region("weights"):
        w = jnp.exp(x[i, :])
    total = w.sum(1)
    out[i] = jnp.log(total)


X = jax.ShapeDtypeStruct((64, 128), jnp.float32)
SOURCE, FIRST = inspect.getsourcelines(energies._definition.function)


def line_of(part: str) -> int:
    """The line of this file with a part of the kernel's source."""
    (number,) = [FIRST + n for n, text in enumerate(SOURCE) if part in text]
    return number


def user_places(ptx: str, file: str = __file__) -> dict[int, set[str]]:
    """The lines of a user's file that PTX names, each with the names of its functions."""
    files = dict(re.findall(r'\.file\s+(\d+) "([^"]*)"', ptx))
    strings = dict(re.findall(r"(\$L__info_string\d+):\n((?:\.b8 \d+[^\n]*\n)+)", ptx))
    names = {label: "".join(chr(int(b)) for b in re.findall(r"\.b8 (\d+)", text)).rstrip("\0")
             for label, text in strings.items()}  # fmt: skip
    places: dict[int, set[str]] = {}
    for number, line, label in re.findall(r"\.loc\s+(\d+) (\d+) \d+, function_name (\S+), inlined_at", ptx):
        if files[number] == file:
            places.setdefault(int(line), set()).add(names[label])
    return places


def test_ptx_has_the_lines_of_the_kernel_and_the_names_of_its_regions() -> None:
    places = user_places(energies.trace(X).lower("cuda:sm_90").compile().asm["ptx"])
    assert places[line_of("jnp.exp(")] == {"weights"}
    assert places[line_of("w.sum(1)")] == places[line_of("jnp.log(")] == {"energies"}
    assert set(places) <= set(range(FIRST, FIRST + len(SOURCE)))


def test_machine_code_has_the_lines_of_the_kernel() -> None:
    cubin = energies.trace(X).lower("cuda:sm_90").compile().asm["cubin"]
    listing = toolchain.disassemble(cubin, lines=True)
    for part in ("jnp.exp(", "w.sum(1)", "jnp.log("):
        assert re.search(rf'File "{re.escape(__file__)}", line {line_of(part)} inlined at "<tilekern', listing)


def test_a_derived_gradient_has_the_lines_of_the_forward_operations() -> None:
    target, jaxpr = resolve("cuda:sm_90"), jax.make_jaxpr(jax.grad(lambda x: energies(x).sum()))(X)
    ptx = [kernel.lowered(target).compile().asm["ptx"] for kernel in kernels_of(jaxpr, target)]
    assert any(places.get(line_of("jnp.exp(")) == {"weights"} for places in map(user_places, ptx))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_attention_has_the_lines_of_the_library(dtype: Any) -> None:
    """Of bfloat16 Gluon is compiled, whose roles are functions of their own."""
    q = jax.ShapeDtypeStruct((1, 256, 2, 128), dtype)
    text = jax.jit(lambda q: flash_attention(q, q, q, target="cuda:sm_90")).trace(q).lower(lowering_platforms=("cuda",))
    assert text is not None
    binary = list(compiler._memory.values())[-1]
    file = inspect.getsourcefile(inspect.unwrap(flash_attention))
    ptx = binary.text("ptx")
    lines = [user_places(ptx, name) for name in re.findall(r'\.file\s+\d+ "([^"]*)"', ptx)]
    assert file is not None and sum(map(len, lines)) > 5


# --- the rewriting ---------------------------------------------------------------------------------------------------


def sampled() -> Any:
    return compile_program(samples.add(), HOPPER)


def test_each_line_of_a_sample() -> None:
    program = samples.add()
    ptx = compile_program(program, HOPPER).text("ptx")
    assert set(user_places(ptx, str(USER))) >= {2, 3}
    found = {i.source for i in parse(ptx).instructions} - {0}
    assert found <= {*program.lines, samples.BODY - 1}, "the lines of the generated source are the places of inlining"
    assert file_name(program) in ptx


def test_instructions_are_those_without_the_lines() -> None:
    """The lines are written behind all passes, and decide nothing."""

    def code(ptx: str) -> list[str]:
        entry = ptx[ptx.index(".entry") : ptx.index("\n}")]
        return [line for line in entry.splitlines() if not re.match(r"\s*(\.loc|\$L__(tmp|func)|//)", line)]

    program = samples.matmul(num_warps=8)
    hidden = replace(program, lines={}, loc=UNKNOWN)
    with_lines, without = (compile_program(p, HOPPER).text("ptx") for p in (program, hidden))
    assert str(USER) in with_lines and str(USER) not in without
    assert code(with_lines) == code(without)


def test_a_line_of_the_user_is_a_part_of_the_key() -> None:
    """Programs of two files may have the same text; the code of each names its own file."""
    program = samples.add()
    moved = replace(program, lines={n: Loc("/elsewhere/user.py", loc.line) for n, loc in program.lines.items()})
    assert user_places(compile_program(program, HOPPER).text("ptx"), str(USER))
    assert set(user_places(compile_program(moved, HOPPER).text("ptx"), "/elsewhere/user.py")) >= {2, 3}


def test_a_line_that_nobody_wrote_is_the_kernels() -> None:
    program = samples.add()
    head = replace(program, lines={})
    assert set(user_places(compile_program(head, HOPPER).text("ptx"), str(USER))) == {100}


@pytest.mark.parametrize("name", ['say "so"', "a\\b", "größe", "a/b", "x" * 300])
def test_any_name_of_a_region_or_a_file(name: str) -> None:
    program = samples.add()
    loc = Loc(f"/tmp/{name}.py", 7, region=name)
    ptx = compile_program(replace(program, lines=dict.fromkeys(program.lines, loc)), HOPPER).text("ptx")
    assert re.search(r"\.loc\s+\d+ 7 1, function_name", ptx)


def test_amd_has_the_lines_too() -> None:
    binary = compile_program(samples.add(), CHIPS["rocm:gfx942"])
    assert str(USER) in binary.text("amdgcn") or USER.name in binary.text("amdgcn")


_LLIR = """define void @f() !dbg !3 {
  ret void, !dbg !4
  ret void, !dbg !5
  ret void, !dbg !8
  ret void, !dbg !9
}
!0 = distinct !DICompileUnit(language: DW_LANG_C, file: !1, producer: "triton", emissionKind: LineTablesOnly)
!1 = !DIFile(filename: "<tilekern f 0>", directory: "")
!2 = !DISubroutineType(cc: DW_CC_normal, types: !{})
!3 = distinct !DISubprogram(name: "f", scope: !1, file: !1, line: 3, type: !2, unit: !0)
!4 = !DILocation(line: 5, column: 9, scope: !3)
!5 = !DILocation(line: 291, column: 36, scope: !6, inlinedAt: !4)
!6 = distinct !DILexicalBlockFile(scope: !3, file: !7, discriminator: 0)
!7 = !DIFile(filename: "standard.py", directory: "/triton")
!8 = !DILocation(line: 6, column: 1, scope: !3)
!9 = !DILocation(line: 1, column: 1, scope: !6)
"""


def rewritten(**changes: Any) -> list[str]:
    program = replace(samples.add(), name="f", lines={5: Loc("/u/k.py", 33, 4, function="g")}, loc=Loc("/u/k.py", 30))
    return with_user_lines(_LLIR, replace(program, **changes), "<tilekern f 0>").splitlines()


def test_places_are_inlined_at_the_outermost_place_in_the_source() -> None:
    lines = {match[1]: match[2] for line in rewritten() if (match := re.match(r"!(\d+) = (.*)", line))}
    assert lines["4"] == lines["5"], "a place in a function of Triton is the place of its call"
    scope, caller = re.findall(r"!(\d+)", lines["4"].removeprefix("!DILocation"))
    assert lines["4"] == f"!DILocation(line: 33, column: 5, scope: !{scope}, inlinedAt: !{caller})"
    assert lines[caller] == "distinct !DILocation(line: 5, column: 9, scope: !3)"
    shared = "type: !2, unit: !0"
    assert re.fullmatch(
        rf'distinct !DISubprogram\(name: "g", linkageName: "g", scope: !(\d+), file: !\1, {shared}, .*\)', lines[scope]
    )
    assert "line: 30, column: 1" in lines["8"] and 'name: "f"' in "".join(lines.values())
    assert lines["9"] == "!DILocation(line: 1, column: 1, scope: !6)", "a place in another file stays"


def test_without_places_nothing_changes() -> None:
    assert rewritten(lines={}, loc=UNKNOWN) == _LLIR.splitlines()


def test_other_threads_and_hooks_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook of the user still runs; programs that other threads compile are not ours to rewrite."""
    from tilekern.lower.triton.compile.debug_lines import user_lines

    calls: list[tuple[Any, ...]] = []

    def users(*arguments: Any) -> tuple[str, str]:
        calls.append(arguments)
        return "key", "hash"

    runtime = toolchain.triton().knobs.runtime
    monkeypatch.setattr(runtime, "add_stages_inspection_hook", users)
    elsewhere: dict[str, Any] = {"llir": len}
    with user_lines(samples.add(), "file"):
        hook = runtime.add_stages_inspection_hook
        assert hook() == ("key", "hash")
        worker = threading.Thread(target=hook, args=(None, elsewhere, None, None, None))
        worker.start()
        worker.join()
        mine: dict[str, Any] = {"llir": len}
        hook(None, mine, None, None, None)
    assert elsewhere["llir"] is len and mine["llir"] is not len and len(calls) == 3
    assert runtime.add_stages_inspection_hook is users
