"""The hashes of the library's programs: the same for the same tree, others for other programs."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tilekern as tk
from bench import texts
from tilekern.kernels.softmax import cases
from tilekern.lower.target import TARGETS


@pytest.fixture
def one_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "CASES", cases.CASES[:1])
    monkeypatch.setattr(texts, "_PROGRAMS", ("cpu:llvm", "cuda:sm_90", "tpu:v5e"))


def run(*arguments: Any) -> int:
    return texts.main(["--only", "softmax", *map(str, arguments)])


@pytest.mark.usefixtures("one_case")
def test_two_runs_are_equal_and_a_changed_program_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    assert run("--out", first) == 0
    found = json.loads(first.read_text())
    assert {len(key.split()) for key in found} <= {6, 8} and any(key.endswith("program") for key in found)
    assert len(set(found.values())) > 6  # one hash for all would find nothing
    assert run("--out", second, "--compare", first) == 0
    assert found == json.loads(second.read_text())

    key = next(key for key in found if key.endswith("program"))
    first.write_text(json.dumps({**found, key: "another", "softmax a float32 forward cpu:llvm gone": ""}))
    assert run("--out", second, "--compare", first) == 1
    out = capsys.readouterr().out
    assert f"{key} differs" in out and "forward cpu:llvm gone is gone" in out and out.endswith("programs differ\n")


def test_lines_of_the_source_do_not_count() -> None:
    triton = "x = tl.load(y)  # kernel.py:{}\n", 'z = "#"\n'
    assert texts._hash(triton[0].format(1)) == texts._hash(triton[0].format(22)) != texts._hash("x = tl.load(z)\n")
    assert texts._hash("%1 = add %2 loc(#loc1)\n") == texts._hash("%1 = add %2 loc(#loc7)\n")


def with_short_names() -> Any:
    @tk.kernel(out_type=lambda x: x)
    def doubled(x: tk.Ref, out: tk.Ref) -> None:
        i = tk.parallel(x.shape[0], 64)
        y = x[i] * 2
        z = jnp.exp(y) + y
        out[i] = z

    return doubled


def with_long_names() -> Any:
    @tk.kernel(out_type=lambda x: x)
    def doubled(x: tk.Ref, out: tk.Ref) -> None:
        i = tk.parallel(x.shape[0], 64)
        twice = x[i] * 2
        total = jnp.exp(twice) + twice
        out[i] = total

    return doubled


def test_names_of_variables_do_not_count() -> None:
    def hashes(kernel: Any) -> dict[str, str]:
        return dict(texts._texts(kernel, [jax.ShapeDtypeStruct((256,), jnp.float32)], TARGETS["cuda:sm_90"]))

    assert hashes(with_short_names()) != hashes(with_long_names())
    with texts.nameless():
        assert hashes(with_short_names()) == hashes(with_long_names())
