"""llvmlite: compiling programs, and doing without."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.lower.llvm import tasks
from tests.lower.llvm.tasks import ARM, HASWELL, like, numbers, process, run, scale, through_scratch
from tilekern.errors import DependencyError, ResourceError, TargetError
from tilekern.lower.llvm import calibration
from tilekern.lower.llvm.call import call
from tilekern.lower.llvm.compile import toolchain
from tilekern.lower.llvm.compile.toolchain import Compiled
from tilekern.lower.llvm.ir_builder import Code
from tilekern.lower.llvm.ir_values import F32, Reg
from tilekern.lower.llvm.program import Program
from tilekern.lower.llvm.runtime import ffi_handler

pytest.importorskip("llvmlite", reason="needs llvmlite")


@pytest.mark.smoke
def test_threads_compile_a_program_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    original = toolchain._link
    toolchain.code_table()  # linked, too, at the first program
    monkeypatch.setattr(toolchain, "_link", lambda name, *rest: names.append(name) or original(name, *rest))
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda n: toolchain.compile(scale(5, 10.0 + n % 4)), range(32)))
    assert len(names) == len({c.name for c in made}) == len({c.code for c in made}) == 4
    assert all(c == made[n % 4] for n, c in enumerate(made))


def test_names() -> None:
    """Whatever changes the code changes its name."""
    base = scale(4)
    others = [scale(5), scale(4, 3.0), scale(4, machine=HASWELL), through_scratch(4, 8), through_scratch(4, 80)]
    others += [Program("other", base.module, 4, 0), Program("by_hand", base.module, 4, 0, zeroed=(0,))]
    names = {toolchain.compile(made).name for made in (base, *others)}
    assert len(names) == 1 + len(others)
    assert all(name.startswith("tilekern_llvm_") for name in names)
    assert toolchain.compile(scale(4)).name == toolchain.compile(base).name
    assert process("print(toolchain.compile(scale(4)).name)") == toolchain.compile(base).name + "\n"


def test_compiling_leaves_the_program_alone() -> None:
    made = scale(4)
    before = made.module.text
    toolchain.compile(made)
    assert made.module.text == before


def test_assembly() -> None:
    host = toolchain.host()
    assembly = toolchain.compile(scale(4)).assembly
    assert ffi_handler.HANDLER in assembly
    if host.is_x86:
        assert {64: "zmm", 32: "ymm"}[host.vector_bytes] in assembly


def test_code_for_a_lesser_machine_runs_here() -> None:
    if toolchain.host().triple != HASWELL.triple:
        pytest.skip("needs an x86-64 with Linux")
    x, made = numbers(4), scale(4, machine=HASWELL)
    assert "zmm" not in toolchain.compile(made).assembly
    np.testing.assert_array_equal(run(made, x), 2 * x)


def test_code_for_another_machine() -> None:
    other = HASWELL if toolchain.host().triple.startswith("a") else ARM
    made = scale(4, 3.0, machine=other)
    compiled = toolchain.compile(made)
    assert compiled.code is None
    assert "fmul" in compiled.assembly
    with pytest.raises(TargetError, match="by_hand was compiled for another CPU") as caught:
        call(made, [like(numbers(4))], {}, numbers(4))
    assert (caught.value.got, caught.value.loc.file) == (f"{other.triple}, {other.cpu}", __file__)


@pytest.mark.parametrize(("machine", "mode"), [(ARM, "msr\tFPCR"), (HASWELL, "ldmxcsr")], ids=["arm", "x86"])
def test_the_runtime_of_every_machine(machine: Any, mode: str) -> None:
    assert mode in Compiled("runtime", ffi_handler.runtime(machine).text, machine, None).assembly


def test_a_fork_compiles_and_calls() -> None:
    """While a thread compiles all the time."""
    code = """
import os, threading
from tests.lower.llvm.fake_xla import FakeXla
def compile_on():
    for n in range(10**9): toolchain.compile(scale(4, float(n)))
threading.Thread(target=compile_on, daemon=True).start()
for n in range(8):
    child = os.fork()
    if not child:
        import signal
        signal.alarm(20)
        x = np.arange(256, dtype=np.float32); y = np.zeros_like(x)
        FakeXla(4).call(handler(scale(4, n + 0.5)), [x], [y])
        os._exit(0 if np.array_equal(y, (n + np.float32(0.5)) * x) else 1)
    assert os.waitpid(child, 0)[1] == 0, n
print("done", flush=True)
os._exit(0)
"""
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    assert process(code) == "done\n"


# --- what does not work ----------------------------------------------------------------------------------------------


def test_too_much_scratch() -> None:
    with pytest.raises(ResourceError, match="by_hand needs too much memory") as caught:
        toolchain.compile(through_scratch(1, calibration.MAX_SCRATCH + 64))
    assert caught.value.got == "scratch = 1073741888 bytes"
    assert caught.value.loc.file == __file__


def test_bad_code_is_our_bug() -> None:
    def body(code: Code, buffer: Any, number: Reg, scratch: Reg) -> None:
        code.do(text)

    for text, message in [("%x = add i64 %y, 1", "use of undefined value"), ("%x = fadd i64 1, 1", "invalid operand")]:
        with pytest.raises(AssertionError, match=message) as caught:
            toolchain.compile(tasks.program(body))
        assert text in str(caught.value)


def test_a_function_that_nobody_has(capfd: pytest.CaptureFixture[str]) -> None:
    def body(code: Code, buffer: Any, number: Reg, scratch: Reg) -> None:
        code.module.declare("no_such_function", F32, [F32])
        code.store(code.call("no_such_function", F32, code.load(F32, buffer(0))), buffer(0))

    with pytest.raises(AssertionError, match="materialize"):
        toolchain.compile(tasks.program(body))
    assert "no_such_function" in capfd.readouterr().err


@pytest.fixture
def fresh() -> Any:
    """A toolchain that looks for llvmlite again, and again after the test."""
    toolchain.llvmlite.cache_clear()
    yield
    toolchain.llvmlite.cache_clear()


def test_no_llvmlite(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made = scale(1)
    toolchain.llvmlite.cache_clear()
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    with pytest.raises(DependencyError, match="the target cpu needs llvmlite") as caught:
        toolchain.compile(made)
    assert caught.value.expected == "llvmlite >= 0.45, < 0.51"
    assert caught.value.fix == "pip install 'llvmlite>=0.45,<0.51'"
    assert caught.value.loc.file == __file__


def test_a_broken_llvmlite(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> Any:
        raise OSError("Could not find/load shared object file 'libllvmlite.so'")

    monkeypatch.setattr(toolchain.importlib, "import_module", load)
    with pytest.raises(DependencyError, match="got: OSError: Could not find/load"):
        toolchain.llvmlite()


@pytest.mark.parametrize(
    ("name", "error"), [("initialize_all_targets", "RuntimeError"), ("create_lljit_compiler", "AttributeError")]
)
def test_an_llvmlite_of_another_interface_falls_back(name: str, error: str) -> None:
    """In a process of its own, which has linked nothing yet."""
    code = f"""
import warnings
import jax, llvmlite.binding
import tilekern as tk
def fail(*_, **__): raise {error}("changed")
llvmlite.binding.{name} = fail
@tk.kernel(out_type=lambda x: x)
def double(x, out):
    out[...] = x[...] * 2
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print(double(jax.numpy.ones(2)))
(one,) = caught
assert one.category is tk.errors.FallbackWarning
assert "llvmlite does not work" in str(one.message) and "{error}: changed" in str(one.message), one.message
"""
    assert process(code) == "[2. 2.]\n"


@pytest.mark.parametrize("version", ["0.45.0", "0.50.0", "0.46.0rc1", "0.50.1"])
def test_versions_that_work(version: str) -> None:
    toolchain.check_version(version)


@pytest.mark.parametrize("version", ["0.44.0", "0.9.0", "0.51.0rc1", "1.0", "unknown"])
def test_versions_that_do_not(version: str) -> None:
    with pytest.raises(DependencyError, match=r"expected: llvmlite >= 0\.45") as caught:
        toolchain.check_version(version)
    assert caught.value.got == f"llvmlite {version}"
