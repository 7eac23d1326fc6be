"""Traced kernels in files: `Traced.save` and `tilekern.load`."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lang.checks import like_first, numbers, refused
from tests.lower.library import CASES, NAMES, family_of
from tilekern.errors import ArgumentError, LoadError, NotDifferentiableError, ParseError, TargetError
from tilekern.kernel.interface import of_flat_arrays
from tilekern.kernel.stages import Traced
from tilekern.lower.target import TARGETS

X = numbers(10)
SAVED_FOR = ("cpu:llvm", "cuda:sm_90", "tpu:v5e")


@tk.kernel(out_type=lambda x, scale: {"sum": x["a"], "rest": [x["b"][0], jax.ShapeDtypeStruct((10,), jnp.int32)]})
def mixed(x, scale, out, *, shift: float = 1.0, block: tk.Block = 4):
    i = tk.parallel(10, block)
    out["sum"][i] = x["a"][i] * scale[...] + x["b"][0][i].astype(jnp.float32) + shift
    out["rest"][0][i] = x["b"][0][i] * 2
    out["rest"][1][i] = i.indices


@mixed.schedule("cuda")
def _cuda(x: Any, scale: Any) -> dict[str, int]:
    return {"block": 8, "num_warps": 2}


ARGUMENTS = {"a": X, "b": (X.astype(jnp.bfloat16),)}, np.float32(3)


def saved(traced: tk.Traced, path: Path, targets: Any = SAVED_FOR) -> tk.Traced:
    traced.save(path / "kernel.tile", targets)
    return tk.load(path / "kernel.tile")


def resealed(path: Path, old: str, new: str) -> None:
    """Change a file, and its hash with it."""
    first, _, rest = path.read_text().partition("\n")
    assert old in rest
    rest = rest.replace(old, new)
    path.write_text(f"{first[:-64]}{hashlib.sha256(rest.encode()).hexdigest()}\n{rest}")


def test_a_loaded_kernel_computes_the_same(tmp_path: Path) -> None:
    traced = mixed.trace(*ARGUMENTS, shift=0.5)
    loaded = saved(traced, tmp_path)
    expected = mixed(*ARGUMENTS, shift=0.5)
    for run in (loaded, jax.jit(loaded), loaded.interpret, loaded.lower("cpu:llvm").compile(), traced):
        jax.tree.map(np.testing.assert_array_equal, run(*ARGUMENTS), expected)
    many = jax.vmap(loaded)(*jax.tree.map(lambda x: jnp.stack([x, x]), ARGUMENTS))
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[1], y), many, expected)


def test_a_loaded_kernel_has_each_targets_blocks_and_launch_options(tmp_path: Path) -> None:
    traced = mixed.trace(*ARGUMENTS)
    loaded = saved(traced, tmp_path)
    assert [loaded.lower(name).ir.axes[0].block for name in SAVED_FOR] == [4, 8, 4]
    assert all(loaded.lower(name).text == traced.lower(name).text for name in SAVED_FOR)
    assert loaded._kernel.launch(TARGETS["cuda:sm_90"]) == {"num_warps": 2}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", NAMES)
def test_kernels_of_the_library_lower_to_the_same_programs(name: str, tmp_path: Path) -> None:
    family = family_of(name, CASES[name][0], "bfloat16")
    default = TARGETS["cpu:llvm"]
    loaded = saved(Traced(family, of_flat_arrays(family, default), default), tmp_path)
    for target in SAVED_FOR:
        assert loaded.lower(target).text == family.lowered(TARGETS[target]).text


def test_saving_again_gives_the_same_file(tmp_path: Path) -> None:
    loaded = saved(mixed.trace(*ARGUMENTS), tmp_path)
    first = (tmp_path / "kernel.tile").read_text()
    loaded.save(tmp_path / "again.tile", SAVED_FOR)
    assert (tmp_path / "again.tile").read_text() == first
    assert '"statics": {"shift": "1.0 (float)"}' in first


def test_arrays_that_the_body_closes_over_are_in_the_file(tmp_path: Path) -> None:
    table = np.arange(5000, dtype=np.float32)

    @like_first
    def shifted(x, out, *, block: tk.Block = 4):
        i = tk.parallel(x.shape[0], block)
        out[i] = x[i] + jnp.asarray(table)[: x.shape[0]].sum()

    loaded = saved(shifted.trace(X), tmp_path)
    np.testing.assert_array_equal(loaded(X), shifted(X))


_ELSEWHERE = """
import sys, numpy as np, tilekern as tk
x = np.arange(4, dtype=np.float32)
np.testing.assert_array_equal(tk.load(sys.argv[1])(x), x * 2)
"""
_VERSION_1 = """tilekern kernel, version 1, sha256 {0}
{"name": "double",
"arrays": ["x", "out"],
"arguments": ["f32[4]"],
"results": ["f32[4]"],
"single": true,
"statics": {},
"captured": [],
"asked": null,
"default": "cpu:xla",
"residuals": 1024,
"members": [{"reads": [0], "constants": []}],
"targets": {"cpu:xla": {"member": 0, "launch": {}}, "cpu:llvm": {"member": 0, "launch": {}}}}

func @double(%x: ref<f32[4], in>, %out: ref<f32[4], out>) {
  grid %axis0 in axis0[4 by 2]
  %0 = load %x[2*%axis0 +: 2!] : f32[2] @ "gone.py":5:13-17 in double
  %1 = constant 2.0 : f32[2]
  %2 = mul(%0, %1) : f32[2]
  store %2 to %out[2*%axis0 +: 2!]
}
"""


def test_a_file_of_version_1_is_read_in_another_process(tmp_path: Path) -> None:
    path = tmp_path / "double.tile"
    path.write_text(_VERSION_1.replace("{0}", 64 * "0"))
    resealed(path, '"name": "double"', '"name": "double"')
    subprocess.run([sys.executable, "-c", _ELSEWHERE, path], check=True, timeout=100)


def test_derivatives_of_a_loaded_kernel_are_derived(tmp_path: Path) -> None:
    loaded = saved(mixed.trace(*ARGUMENTS), tmp_path)

    def gradient(function: Any) -> Any:
        return jax.grad(lambda x, scale: (function(x, scale)["sum"] ** 2).sum(), argnums=1)(*ARGUMENTS)

    np.testing.assert_array_equal(gradient(loaded), gradient(mixed))
    assert str(loaded.gradient("scale").backward[0]) == str(mixed.trace(*ARGUMENTS).gradient("scale").backward[0])


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    mixed.trace(*ARGUMENTS).save(tmp_path / "mixed.tile", ["cpu:xla"])
    return tmp_path / "mixed.tile"


def test_a_changed_file(file: Path) -> None:
    file.write_text(file.read_text().replace("1.0", "1.5"))
    with refused(
        LoadError, "mixed.tile is not the file of a saved kernel", got="changed after it was saved", fix="again"
    ):
        tk.load(file)  # <-


def test_another_file(file: Path) -> None:
    file.write_bytes(b"\x89PNG\xff")
    with refused(LoadError, "is not the file of a saved kernel", expected="kernel.trace(...).save(path)", got="begins"):
        tk.load(file)  # <-


def test_a_newer_version(file: Path) -> None:
    file.write_text(file.read_text().replace("version 1", "version 3"))
    with refused(LoadError, "newer version of tilekern", expected="version 2", got="version = 3", fix="upgrade"):
        tk.load(file)  # <-


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"bf16[10]"', '"bf16[11]"'),  # an array that callers may give, and the Func does not have
        ('"f32[10]"', '"f33[10]"'),
        ('"reads": [0', '"reads": [7'),
        ('"member": 0', '"member": 1'),
        ('"launch": {}', '"launch": {"num_warps": 0}'),
        ('"default": "cpu:xla"', '"default": "cpu:abc"'),
        ('"single": true', '"double": true'),
        ("func @", "fund @"),
    ],
)
def test_a_header_that_does_not_fit(file: Path, old: str, new: str) -> None:
    """An editor that renews the hash, too, is found by the checks of the header."""
    resealed(file, old, new)
    with refused(LoadError, "is not the file of a saved kernel", got="a header that does not fit"):
        tk.load(file)  # <-


def test_a_func_that_breaks_a_rule(file: Path) -> None:
    resealed(file, "= mul(", "= mol(")
    with pytest.raises(ParseError, match="no op is named mol"):
        tk.load(file)


def test_a_target_that_the_file_lacks(file: Path) -> None:
    with refused(TargetError, "no blocks for this target", expected="'cpu:xla'", got="cuda:sm_90", fix="targets="):
        tk.load(file).lower("cuda:sm_90")  # <-


def test_derivatives_that_an_author_states_are_not_in_the_file(tmp_path: Path) -> None:
    """A derived derivative might be another one."""

    @like_first
    def identity(x, out):
        out[...] = x[...]

    @identity.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return identity(*primals), 2 * tangents[0]

    loaded = saved(identity.trace(X), tmp_path)
    with refused(NotDifferentiableError, "identity was loaded from a file", got="of identity", fix="custom_vjp"):
        jax.jvp(loaded, (X,), (X,))  # <-


class Pair(NamedTuple):
    """A container that the header has no form for."""

    a: Any
    b: Any


def test_arguments_in_other_containers(tmp_path: Path) -> None:
    @tk.kernel(out_type=lambda pair: pair.a)
    def add(pair, out):
        out[...] = pair.a[...] + pair.b[...]

    with refused(ArgumentError, "add cannot be saved", expected="tuples, lists and dicts", got="Pair", fix="tuple"):
        add.trace(Pair(X, X)).save(tmp_path / "add")  # <-


def test_a_write_that_fails_leaves_the_file_as_it_was(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = file.read_text()

    def full(self: Path, *_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space"):
        mixed.trace(*ARGUMENTS, shift=2.0).save(file)
    assert [path.read_text() for path in file.parent.iterdir()] == [before]
