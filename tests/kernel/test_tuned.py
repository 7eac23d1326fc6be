"""Files of tuned blocks: which calls they serve, and what they refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lang.checks import refused
from tilekern.errors import ArgumentError, LoadError
from tilekern.kernel import body
from tilekern.kernel.tuned import Entry, Key
from tilekern.kernels.matmul.kernel import matmul
from tilekern.kernels.softmax.kernel import softmax_forward
from tilekern.lower.target import resolve

pytestmark = pytest.mark.sweep(1)  # all cases: none compiles a program

X = jnp.arange(1000.0)


@tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
def double(x: Any, out: Any, *, block: tk.Block = 128) -> None:
    i = tk.parallel(x.shape[0], block)
    out[i] = x[i] * 2


@tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape[:1], x.dtype))
def row_sums(x: Any, out: Any, *, rows: tk.Block = 4, columns: tk.Block = 64) -> None:
    i = tk.parallel(x.shape[0], rows)
    out[i] = tk.fold(tk.serial(x.shape[1], columns), lambda j, s: s + x[i, j].sum(axis=1), tk.zeros(i, x.dtype))


def key(kernel: Any, *args: Any, target: str = "cpu:xla", **keywords: Any) -> Key:
    return kernel.trace(*args, **keywords)._kernel.tuning.key(resolve(target))


def entry(key: Key, **settings: Any) -> Entry:
    return Entry(key, tuple(settings.items()), "measurement", 1e-3, 2e-3, 0.99, "2026-11-26")


def block_of(x: Any = X, **keywords: Any) -> int:
    """The block with which a call is lowered for cpu:xla."""
    return double.trace(x, target="cpu:xla", **keywords).ir.axes[0].block


def test_a_call_has_the_blocks_of_the_file(tmp_path: Path) -> None:
    tk.Tuned((entry(key(double, X), block=32),)).save(tmp_path / "tuned.json")
    with tk.tuned(tmp_path / "tuned.json"):
        assert block_of() == 32
        np.testing.assert_array_equal(double(X), 2 * X)
    assert block_of() == 128


def test_blocks_of_the_call_win_over_the_file() -> None:
    with tk.Tuned((entry(key(double, X, block=64), block=32), entry(key(double, X), block=32))):
        assert block_of(block=64) == 64


def test_jitted_functions_are_traced_again_for_another_table() -> None:
    blocks: list[int] = []

    @tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
    def noted(x: Any, out: Any, *, block: tk.Block = 128) -> None:
        blocks.append(block)
        i = tk.parallel(x.shape[0], block)
        out[i] = x[i] * 2

    jitted = jax.jit(lambda x: noted(x, target="cpu:xla"))
    jitted(X)
    with tk.Tuned((entry(key(noted, X), block=32),)):
        jitted(X)
    with tk.Tuned((entry(key(noted, X), block=16),)):
        jitted(X)
    assert [block for block in blocks if block != 128] == [32, 16]


@pytest.mark.parametrize(
    "other",
    [
        {"kernel": "another"},
        {"ir": "0123456789abcdef"},
        {"device": "another machine"},
        {"target": "cuda:sm_90"},
        {"versions": (("tilekern", "0.0.1"),)},
        {"programs": 1024},
        {"gradient": True},
        {"fixed": (("block", 1),)},
    ],
    ids=lambda other: next(iter(other)),
)
def test_an_entry_of_another_key_is_a_miss(other: dict[str, Any]) -> None:
    own = key(double, X)
    with tk.Tuned((entry(replace(own, **other), block=32),)):
        assert block_of() == 128
    with tk.Tuned((entry(own, block=32),)):
        assert block_of() == 32


def test_an_estimate_serves_every_machine_of_its_target_and_a_measurement_wins() -> None:
    own = key(double, X)
    estimate = replace(entry(replace(own, device=""), block=16), by="estimate")
    with tk.Tuned((estimate,)):
        assert block_of() == 16
    with tk.Tuned((estimate, entry(own, block=32))):
        assert block_of() == 32


def test_kernels_that_differ_in_a_constant_have_other_keys() -> None:
    @tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
    def double(x: Any, out: Any, *, block: tk.Block = 128) -> None:
        i = tk.parallel(x.shape[0], block)
        out[i] = x[i] * 3

    own = key(globals()["double"], X)
    assert (own.kernel, key(double, X).kernel) == ("double", "double")
    assert own.ir != key(double, X).ir


def test_extents_are_in_buckets_and_those_of_the_grid_are_left_out() -> None:
    def of(*shape: int) -> Key:
        return key(row_sums, jax.ShapeDtypeStruct(shape, jnp.float32))

    assert of(8192, 1000) == of(16000, 1024) != of(8192, 1025)
    assert of(8192, 1000).extents == (("x[1]", 1024),)
    assert of(64, 1000) != of(8192, 1000)  # too few programs to keep a machine busy


def test_files_merge_and_measurements_win(tmp_path: Path) -> None:
    own, other = key(double, X), key(row_sums, jnp.ones((8, 8)))
    estimate = replace(entry(own, block=16), by="estimate")
    file = tmp_path / "tuned.json"
    tk.Tuned((entry(own, block=32),)).save(file)
    tk.Tuned((estimate, entry(other, rows=2))).save(file)
    merged = tk.tuned(file)
    assert {e.key: dict(e.settings) for e in merged.entries} == {own: {"block": 32}, other: {"rows": 2}}
    assert merged == tk.Tuned((entry(other, rows=2),)).merge(tk.Tuned((entry(own, block=32),)))


def test_the_environment_names_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tk.Tuned((entry(key(double, X), block=32),)).save(tmp_path / "tuned.json")
    monkeypatch.setenv("TILEKERN_TUNED", str(tmp_path / "tuned.json"))
    assert block_of() == 32
    monkeypatch.setenv("TILEKERN_TUNED", str(tmp_path / "missing.json"))
    with refused(LoadError, "which TILEKERN_TUNED names"):
        double(X)  # <-


def _damaged(field: str, value: Any) -> str:
    saved = json.loads(tk.Tuned((entry(key(double, X), block=32),))._text)  # pyright: ignore[reportPrivateUsage]
    saved["entries"][0][field] = value
    return json.dumps(saved)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": "tilekern tuned, version 2", "entries": []}',
        '{"format": "tilekern tuned, version 1"}',
        '{"format": "tilekern tuned, version 1", "entries": [{}]}',
        _damaged("settings", {"block": 0}),
        _damaged("settings", {"block": 1.5}),
        _damaged("settings", 7),
        _damaged("by", "magic"),
        _damaged("extents", {"x[0]": "many"}),
        _damaged("emitter", 7),
        "\ud800",
    ],
)
def test_damaged_files_are_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "tuned.json"
    file.write_bytes(text.encode(errors="surrogatepass"))
    with refused(LoadError, "is not a file of tuned blocks"):
        tk.tuned(file)  # <-


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with refused(LoadError, "is not a file of tuned blocks"):
        tk.tuned(tmp_path / "missing.json")  # <-


def test_what_is_no_file_of_tuned_blocks_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("notes")
    with refused(LoadError, "is not a file of tuned blocks"):
        tk.Tuned().save(tmp_path / "notes.txt")  # <-
    assert (tmp_path / "notes.txt").read_text() == "notes"


def test_a_file_in_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with refused(ArgumentError, "cannot be written"):
        tk.Tuned().save(tmp_path / "missing" / "tuned.json")  # <-


def test_a_read_only_file_is_refused_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tk.Tuned().save(tmp_path / "tuned.json")
    # Root may write to read-only files.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "tuned.json")
    with refused(ArgumentError, "cannot be written"):
        tk.Tuned((entry(key(double, X), block=32),)).save(tmp_path / "tuned.json")  # <-
    assert tk.tuned(tmp_path / "tuned.json").entries == ()


def test_settings_that_the_kernel_does_not_have_are_refused() -> None:
    with (
        tk.Tuned((entry(key(double, X), blocks=32),)),
        refused(ArgumentError, "names a block that double does not have"),
    ):
        double(X, target="cpu:xla")  # <-


# --- emitters ---------------------------------------------------------------------------------------------------------

H100 = "cuda:sm_90"
LHS, RHS = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((1024, 4096), jnp.bfloat16)
FEW = jax.ShapeDtypeStruct((128, 1024), jnp.bfloat16)  # too few rows for Gluon to be worth it
TRITON = {"block_m": 64, "block_n": 128, "block_k": 32, "num_warps": 4, "num_stages": 2}
GLUON = {"block_m": 64, "block_n": 128, "block_k": 64, "num_warps": 8, "num_stages": 4}


def of_emitter(name: str, lhs: Any = LHS, settings: Any = None) -> Entry:
    """An entry that chose an emitter for calls that leave it open."""
    blocks = settings or {"triton": TRITON, "gluon": GLUON}[name]
    return replace(entry(key(matmul, lhs, RHS, target=f"{H100}+auto"), **blocks), emitter=name)


def lowered(name: str, lhs: Any = LHS) -> Any:
    """The product lowered for a target, whose name may have an emitter."""
    return matmul.trace(lhs, RHS, target=name).lower(name)


def test_an_entry_chooses_the_emitter_of_calls_that_leave_it_open(tmp_path: Path) -> None:
    assert "gluon" in lowered(f"{H100}+auto").text
    with tk.Tuned((of_emitter("triton"),)):
        assert lowered(f"{H100}+auto").text == lowered(H100).text != lowered(f"{H100}+gluon").text
        assert {axis.block for axis in lowered(f"{H100}+auto").ir.axes} == {64, 128}
    assert "gluon" not in lowered(f"{H100}+auto", FEW).text
    tk.Tuned((of_emitter("gluon", FEW),)).save(tmp_path / "tuned.json")
    with tk.tuned(tmp_path / "tuned.json"):
        assert "gluon" in lowered(f"{H100}+auto", FEW).text
        assert lowered(f"{H100}+auto", FEW).text == lowered(f"{H100}+gluon", FEW).text
        assert "gluon" not in lowered(H100, FEW).text  # a call that names the usual emitter keeps it


def test_where_the_emitter_of_an_entry_refuses_the_kernel_triton_serves() -> None:
    with tk.Tuned((of_emitter("gluon", settings={**GLUON, "block_m": 16}),)):
        assert lowered(f"{H100}+auto").text == lowered(H100).text
        assert "gluon" not in lowered(H100).text


@pytest.mark.parametrize("name", ["", "gluten"])
def test_an_entry_that_names_no_emitter_of_the_target_is_a_miss(name: str) -> None:
    untuned = lowered(f"{H100}+auto").text
    with tk.Tuned((replace(of_emitter("triton"), emitter=name),)):
        assert lowered(f"{H100}+auto").text == untuned


def test_an_entry_of_the_emitter_itself_wins() -> None:
    own = entry(key(matmul, LHS, RHS, target=H100), **{**TRITON, "block_k": 64})
    of_open = of_emitter("triton")
    with tk.Tuned((own,)):
        text = lowered(H100).text
    with tk.Tuned((own, of_open)):
        assert lowered(H100).text == text
    with tk.Tuned((of_open,)):
        assert lowered(H100).text != text


def test_a_batched_kernel_has_the_emitter_of_the_entry() -> None:
    with tk.Tuned((of_emitter("triton"),)):
        kernel = matmul.trace(LHS, RHS, target=f"{H100}+auto")._kernel
        batched, _ = kernel.batched(3, (0, 0))
        served, _ = batched.served(resolve(f"{H100}+auto"))
    assert served == resolve(H100)


def test_a_file_without_emitters_has_none_of_their_words(tmp_path: Path) -> None:
    tk.Tuned((entry(key(double, X), block=32),)).save(tmp_path / "tuned.json")
    assert "emitter" not in (tmp_path / "tuned.json").read_text()
    tk.Tuned((of_emitter("gluon"),)).save(tmp_path / "tuned.json")
    assert [e.emitter for e in tk.tuned(tmp_path / "tuned.json").entries] == ["", "gluon"]


def test_parameters_have_other_names_than_emitter() -> None:
    with refused(ArgumentError, "has a parameter named emitter"):

        @tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
        def _(x: Any, out: Any, *, emitter: str = "gluon") -> None: ...  # <-


# --- tables that tilekern ships ---------------------------------------------------------------------------------------

ROWS = jax.ShapeDtypeStruct((512, 384), jnp.float32)
SHIPPED = {"block_rows": 2, "block_columns": 384}


def shipped_key(x: Any = ROWS, **keywords: Any) -> Key:
    with tk.Tuned(shipped=False):
        tuning = softmax_forward.trace(x, target="cpu:xla", **keywords)._kernel.tuning
        return tuning.shipped_key(resolve("cpu:xla"))


def ship(monkeypatch: pytest.MonkeyPatch, *entries: Entry) -> None:
    """Ship a table for cpu:xla. Earlier calls of these kernels are forgotten: a process has one table."""
    tables = {"cpu:xla": tk.Tuned(entries)}
    monkeypatch.setattr(body, "shipped", tables.get)
    for kernel in (softmax_forward, double):
        monkeypatch.setattr(kernel, "_by_types", {})


def rows_of(x: Any = ROWS, **keywords: Any) -> int:
    """The rows of a program of softmax on cpu:xla."""
    return softmax_forward.trace(x, target="cpu:xla", **keywords).ir.axes[0].block


def test_kernels_of_tilekern_have_the_blocks_that_it_ships(monkeypatch: pytest.MonkeyPatch) -> None:
    own = rows_of()
    assert own != 2
    ship(monkeypatch, entry(shipped_key(), **SHIPPED))
    assert rows_of() == 2
    with tk.Tuned(shipped=False):
        assert rows_of() == own
    with tk.Tuned():  # a file of the user without an entry
        assert rows_of() == 2
    with tk.Tuned(shipped=False), tk.Tuned():
        assert rows_of() == own


def test_the_user_wins_over_shipped_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    ship(monkeypatch, entry(shipped_key(), **SHIPPED), entry(shipped_key(block_rows=16), **SHIPPED))
    assert rows_of(block_rows=16) == 16
    with tk.Tuned((entry(key(softmax_forward, ROWS), **{**SHIPPED, "block_rows": 4}),)):
        assert rows_of() == 4


def test_a_shipped_row_serves_its_own_sizes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    ship(monkeypatch, entry(shipped_key(), **SHIPPED))
    for shape, dtype in (((512, 383), jnp.float32), ((511, 384), jnp.float32), ((512, 384), jnp.bfloat16)):
        assert rows_of(jax.ShapeDtypeStruct(shape, dtype)) != 2


@pytest.mark.parametrize(
    "other",
    [
        {"kernel": "another"},
        {"ir": "0123456789abcdef"},
        {"device": "a machine"},
        {"target": "cuda:sm_90"},
        {"versions": (("jaxlib", "0.0.1"),)},
        {"programs": 1024},
        {"gradient": True},
        {"fixed": (("block_rows", 1),)},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_stale_shipped_row_is_a_miss(other: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    own = rows_of()
    ship(monkeypatch, entry(replace(shipped_key(), **other), **SHIPPED))
    assert rows_of() == own


@pytest.mark.parametrize("settings", [{"rows": 2}, {"block_rows": "two"}])
def test_a_shipped_row_of_an_older_signature_is_a_miss(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = rows_of()
    ship(monkeypatch, entry(shipped_key(), **settings))
    assert rows_of() == own


def test_kernels_of_users_have_no_shipped_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = double.trace(X, target="cpu:xla")._kernel.tuning
    ship(monkeypatch, entry(tuning.shipped_key(resolve("cpu:xla")), block=32))
    assert block_of() == 128


def test_shipped_tables_are_read_by_calls_only() -> None:
    code = (
        "import tilekern.kernels, sys; from tilekern.kernel.tuned import shipped;"
        "sys.exit(shipped.cache_info().currsize)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
