"""Interrupts, forks, many threads, the end of the interpreter, and many kernels: no hang, no crash, level memory."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).parent.parent
TARGETS = ("cpu:llvm", "cpu:xla")

PREAMBLE = """\
import faulthandler, gc, os, signal, sys, threading, time
faulthandler.dump_traceback_later(90, exit=True)  # a hang is a failure
import jax, jax.numpy as jnp, numpy as np
import tilekern as tk

def made(number, **keywords):
    @tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
    def scaled(x, out, *, block: tk.Block = 64):
        i = tk.parallel(x.shape[0], block)
        out[i] = x[i] * float(number) + 1
    return lambda x: scaled(x, target=TARGET, **keywords)

x = np.ones((1 << 10, 8), np.float32)
jnp.ones(1).block_until_ready()
"""

needs_posix = pytest.mark.skipif(os.name != "posix", reason="needs signals of POSIX")


def start(program: str, target: str, *arguments: str) -> subprocess.Popen[str]:
    """A process that runs a program behind the preamble."""
    code = f"TARGET = {target!r}\n{PREAMBLE}\n{dedent(program)}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", code, *arguments], env=environment, text=True, **pipes)


def end(process: subprocess.Popen[str], timeout: float = 100) -> str:
    """The output of a process, which must end by itself, without a crash."""
    try:
        said, errors = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == 0, f"exit status {process.returncode}\n{errors}"
    return said


def interrupt(process: subprocess.Popen[str]) -> None:
    """Interrupt until the process speaks or ends: Python drops an interrupt inside of a callback of its collector."""
    process.send_signal(signal.SIGINT)
    for _ in range(10):
        if select.select([process.stdout], [], [], 5)[0]:
            break
        process.send_signal(signal.SIGINT)


@needs_posix
@pytest.mark.parametrize("target", TARGETS)
def test_interrupts_while_kernels_compile_and_run(target: str) -> None:
    """After each interrupt the next kernel compiles and gives right numbers."""
    process = start(
        """
        interrupted, number = 0, 0

        def interrupt(*_):
            if interrupted < 12:
                raise KeyboardInterrupt

        signal.signal(signal.SIGINT, interrupt)
        print("ready", flush=True)
        while interrupted < 12:
            try:
                number += 1
                kernel = made(number)
                for _ in range(20):
                    assert (np.asarray(kernel(x)) == number + 1).all()
            except KeyboardInterrupt:
                interrupted += 1
                print("interrupted", flush=True)
            except Exception as error:  # an interrupt inside of a callback of JAX's
                if "KeyboardInterrupt" not in repr(error) + repr(error.__cause__) + repr(error.__context__):
                    raise
                interrupted += 1
                print("interrupted", flush=True)
        print("right", flush=True)
        """,
        target,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for turn in range(12):
        time.sleep(0.03 + 0.011 * turn)
        interrupt(process)
        assert process.stdout.readline() == "interrupted\n", process.communicate()
    assert process.stdout.readline() == "right\n"
    end(process)


@needs_posix
@pytest.mark.parametrize("target", TARGETS)
def test_an_interrupt_ends_a_program(target: str) -> None:
    """Nobody catches it: the process ends soon, with the status of an interrupt."""
    process = start(
        """
        kernel = made(2)
        print("ready", flush=True)
        while True:
            kernel(x)
        """,
        target,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    interrupt(process)
    _, errors = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors and process.returncode in (1, -signal.SIGINT)


@pytest.mark.parametrize("target", TARGETS)
def test_the_interpreter_ends_while_calls_are_in_flight(target: str) -> None:
    """Nobody waits for the results. (A daemon thread inside of JAX aborts the process, without our kernels, too.)"""
    process = start(
        """
        large = jnp.ones((1 << 16, 64), jnp.float32)
        kernel = made(3)
        kernel(large).block_until_ready()
        pending = [kernel(large) for _ in range(50)]
        print("right", flush=True)
        """,
        target,
    )
    assert end(process) == "right\n"


@pytest.mark.parametrize("target", TARGETS)
def test_16_threads_of_200_calls(target: str) -> None:
    process = start(
        """
        kernels = [made(n) for n in range(4)]
        wrong = []

        def work(number):
            for turn in range(200):
                n = (number + turn) % 4
                if not (np.asarray(kernels[n](x)) == n + 1).all():
                    wrong.append((number, turn))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(wrong)
        """,
        target,
    )
    assert end(process) == "[]\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forks_while_threads_compile() -> None:
    """A child of a fork compiles kernels, while other threads of its parent did: no lock stays taken."""
    process = start(
        """
        import warnings
        warnings.simplefilter("ignore")  # Python and JAX warn of forks with threads: the child does not use JAX
        from tilekern.lower.llvm.compile import toolchain
        done = False

        def work(number):
            while not done:
                number += 4
                made(number)(x).block_until_ready()

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads: thread.start()
        time.sleep(0.5)
        for _ in range(10):
            time.sleep(0.03)
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                with toolchain.lock:
                    assembly = toolchain._Codegen("define i32 @f() { ret i32 7 }", toolchain.host()).assembly()
                os._exit(0 if "f:" in assembly else 1)
            assert os.waitpid(child, 0)[1] == 0
        done = True
        for thread in threads: thread.join()
        print("right")
        """,
        "cpu:llvm",
    )
    assert end(process) == "right\n"


MEMORY = """
def resident():
    jax.clear_caches()
    for _ in range(3):
        gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

def kernels(first, count):
    for n in range(first, first + count):
        assert float(made(n)(x)[0, 0]) == n + 1

def calls(count):
    kernel = made(1)
    for _ in range(count):
        y = kernel(x)
    y.block_until_ready()

faulthandler.cancel_dump_traceback_later()
KERNELS, CALLS = map(int, sys.argv[1:])
x = x[:8]
kernels(0, KERNELS // 4)
calls(CALLS // 10)
before = resident()
kernels(KERNELS // 4, KERNELS - KERNELS // 4)
between = resident()
calls(CALLS)
print(f"{before:.1f} {between:.1f} {resident():.1f} MiB")
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize("target", TARGETS)
def test_2000_kernels_and_100000_calls_leave_memory_level(target: str) -> None:
    """8 KiB for each kernel at most: compiled code that was kept would take 70, and an array of a call 1."""
    said = end(start(MEMORY, target, "2000", "100000"), 600)
    before, between, after = map(float, said.split()[:3])
    assert between - before < 1500 * 8 / 1024, said
    assert after - between < 4, said
