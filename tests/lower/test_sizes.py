"""Arrays and grids that are larger than a backend counts: refused with the reason, before anything is allocated."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tilekern import source
from tilekern.errors import LargeProgramWarning, TargetError
from tilekern.lower.sizes import large_programs, warn_of_large_program

BEYOND = 2**31 + 2**26


@tk.kernel(out_type=lambda x: x)
def copy(x: Any, out: Any) -> None:
    i = tk.parallel(x.shape[0], 4096)
    out[i] = x[i]


@tk.kernel(out_type=lambda x: x)
def one_by_one(x: Any, out: Any) -> None:
    """A grid that vmap makes larger."""
    i = tk.parallel(x.shape[0])
    out[i] = x[i]


def of(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.int8)


@pytest.mark.parametrize(
    ("target", "most"), [("cpu:xla", 2**31 - 1), ("tpu:v5e", 2**30), ("tpu:v6e", 2**30), ("tpu:7x", 2**30)]
)
@pytest.mark.parametrize("length", [2**31, BEYOND, 2**40 + 3])
def test_an_array_beyond_int32(target: str, most: int, length: int) -> None:
    with pytest.raises(TargetError, match="too long") as caught:
        copy.trace(of(length)).lower(target)
    error = caught.value
    assert str(most) in error.expected and f"x: ref<i8[{length}], in>" in error.got and "reshape" in error.fix
    assert error.loc.function in ("copy", "", None) and error.loc.file == __file__


def test_a_call_on_the_portable_backend_refuses_too() -> None:
    with pytest.raises(TargetError, match="too long for the portable backend"):
        jax.jit(lambda x: copy(x, target="cpu:xla")).lower(of(BEYOND)).compile()


@pytest.mark.parametrize("length", [BEYOND, 2**40 + 3])
def test_native_code_counts_in_64_bits(length: int) -> None:
    pytest.importorskip("llvmlite", reason="needs llvmlite")
    assert str(-(-length // 4096)) in copy.trace(of(length)).lower("cpu:llvm").text
    assert "i64" in copy.trace(of(length)).lower("cpu:llvm").text


def test_a_grid_that_vmap_makes_too_large() -> None:
    batched = jax.vmap(jax.vmap(lambda x: one_by_one(x, target="cpu:llvm")))
    pytest.importorskip("llvmlite", reason="needs llvmlite")
    with pytest.raises(TargetError, match="grid of one_by_one is too large") as caught:
        jax.jit(batched).lower(of(2**30, 2**30, 2**30))
    assert f"{2**90} programs" in caught.value.got


def test_a_grid_too_large_for_a_tpu() -> None:
    with pytest.raises(TargetError, match="too large for a TPU"):

        @tk.kernel(out_type=lambda x: x)
        def fill(x: Any, out: Any) -> None:
            i, j = tk.parallel(2**16), tk.parallel(2**16)
            out[i, j] = x[i, j]

        fill.trace(of(2**16, 2**16)).lower("tpu:v5e")


@pytest.mark.slow
def test_a_result_beyond_int32() -> None:
    """Allocates 2.1 GiB."""
    pytest.importorskip("llvmlite", reason="needs llvmlite")

    @tk.kernel(out_type=lambda x: of(BEYOND))
    def numbered(x: Any, out: Any) -> None:
        i = tk.parallel(out.shape[0], 4096)
        out[i] = (jnp.arange(4096) % 7 + i.index % 11 + x[0]).astype(jnp.int8)

    found = np.asarray(numbered(np.array([3], np.int32), target="cpu:llvm"))
    for place in (0, 5, 4096, 2**31 - 1, 2**31, 2**31 + 5, BEYOND - 1):
        assert found[place] == place % 4096 % 7 + place // 4096 % 11 + 3


def test_large_programs_are_refused_in_one_thread_only() -> None:
    loc = source.Loc(__file__, 1)
    with large_programs("raise"), pytest.warns(LargeProgramWarning, match="of the other thread"):
        other = threading.Thread(target=warn_of_large_program, args=("of the other thread", loc))
        other.start()
        other.join()
        with pytest.raises(LargeProgramWarning, match="of this thread"):
            warn_of_large_program("of this thread", loc)
