"""The conventions of docs/conventions.md, over the signatures of all public functions of the kernels."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import tilekern.kernels
from tilekern.errors import ArgumentError
from tilekern.kernels.conventions import LAUNCH, check_launch, renamed
from tilekern.kernels.matmul import matmul
from tilekern.kernels.ragged_dot import ragged_contracting_dot

PAGE = (Path(__file__).parents[1] / "docs" / "conventions.md").read_text()
FOLDERS = [m.name for m in pkgutil.iter_modules(tilekern.kernels.__path__) if m.ispkg]
PACKAGES = {folder: importlib.import_module(f"tilekern.kernels.{folder}") for folder in FOLDERS}


def is_function(name: str, value: Any) -> bool:
    """True for a function of arrays that users call: no class, no kernel of tiles, no definition."""
    return inspect.isfunction(value) and not name.endswith("reference")


FUNCTIONS = {
    name: getattr(package, name)
    for package in PACKAGES.values()
    for name in package.__all__
    if is_function(name, getattr(package, name))
}
REFERENCES = {
    **{folder: package.reference for folder, package in PACKAGES.items() if folder in FUNCTIONS},
    "add_rms_norm": PACKAGES["rms_norm"].add_reference,
    "fused_matmul": PACKAGES["matmul"].fused_reference,
    "fused_ragged_dot": PACKAGES["ragged_dot"].fused_reference,
    "quantized_matmul": PACKAGES["matmul"].quantized_reference,
    "ragged_contracting_dot": PACKAGES["ragged_dot"].contracting_reference,
    "log_softmax": PACKAGES["softmax"].log_reference,
    "select_keys": PACKAGES["index_scores"].select_reference,
    "rms_norm_rope": PACKAGES["rope"].normed_reference,
    "sample_hidden": PACKAGES["sample"].hidden_reference,
    "symmetric_matmul": PACKAGES["matmul"].symmetric_reference,
    "write_index_keys": PACKAGES["index_scores"].write_reference,
    "write_latents": PACKAGES["mla_attention"].write_reference,
    "write_pages": PACKAGES["paged_attention"].write_reference,
}
PRODUCTS = ("fused_matmul", "fused_ragged_dot", "matmul", "quantized_matmul", "ragged_contracting_dot", "ragged_dot")


def parameters(function: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def is_block(name: str) -> bool:
    return re.fullmatch(r"block_(?!map)\w+|(num_warps|num_stages|num_ctas)|blocks|launch", name) is not None


def is_array(parameter: inspect.Parameter) -> bool:
    return "Array" in str(parameter.annotation)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arrays_come_first_and_options_by_keyword(name: str) -> None:
    """`axis` of softmax is positional, as in `jax.nn.softmax`; an array that a function may lack comes by keyword."""
    positional = [p for p in parameters(FUNCTIONS[name]) if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in positional if not is_array(p)] == (["axis"] if "softmax" in name else [])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_target_then_blocks_stand_last(name: str) -> None:
    names = [p.name for p in parameters(FUNCTIONS[name])]
    if name in ("block_map", "copy_pages", "write_index_keys"):  # they run no kernel
        return
    place = names.index("target")
    assert all(map(is_block, names[place + 1 :])) and not any(map(is_block, names[:place]))
    assert str(inspect.signature(FUNCTIONS[name]).parameters["target"]) == "target: 'str | None' = None"


@pytest.mark.parametrize("name", [*PRODUCTS, "symmetric_matmul"])
def test_products_have_operands_and_launch_options_of_one_name(name: str) -> None:
    operands = [p.name for p in parameters(FUNCTIONS[name])][:2]
    assert operands == (["x", "added"] if name == "symmetric_matmul" else ["lhs", "rhs"])
    last = parameters(FUNCTIONS[name])[-1]
    assert (last.kind, last.annotation) == (last.VAR_KEYWORD, "Unpack[Launch]")


def test_a_name_is_of_an_array_or_of_an_option() -> None:
    kinds: dict[str, set[bool]] = defaultdict(set)
    for function in (*FUNCTIONS.values(), *REFERENCES.values()):
        for parameter in parameters(function):
            if "Any" not in str(parameter.annotation) and parameter.name not in ("q_offset", "temperature"):  # either
                kinds[parameter.name].add(is_array(parameter))
    assert {name for name, kind in kinds.items() if len(kind) > 1} == set()


def test_names_of_the_table_are_used_and_old_names_are_not() -> None:
    names = {p.name for function in FUNCTIONS.values() for p in parameters(function)}
    table = PAGE[PAGE.index("| name | meaning |") : PAGE.index("**Launch options")]
    rows = re.findall(r"^\| (`[^|]*`) \|", table, re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert listed <= names | {"dtype"}, listed - names
    used_twice = {
        name for name in names if sum(name in (p.name for p in parameters(f)) for f in FUNCTIONS.values()) > 1
    }
    assert {name for name in used_twice if not is_block(name)} <= listed
    assert names.isdisjoint({"w", "delta", "dtype"})


@pytest.mark.parametrize("name", REFERENCES)
def test_a_reference_takes_what_the_function_takes(name: str) -> None:
    """Also the same defaults, in the same order; and a `dtype` to compute in, last."""
    ours = {p.name: p for p in parameters(FUNCTIONS[name]) if p.name != "target" and not is_block(p.name)}
    theirs = {p.name: p for p in parameters(REFERENCES[name])}
    assert list(theirs)[-1] == "dtype" and theirs["dtype"].default is None
    shared = [n for n in ours if n in theirs]
    assert shared == [n for n in theirs if n in ours]
    assert all((ours[n].default, ours[n].kind) == (theirs[n].default, theirs[n].kind) for n in shared)
    assert [n for n in ours if n not in theirs] == MISSING.get(name, [])
    assert [n for n in theirs if n not in ours] == [*EXTRA.get(name, []), "dtype"]


# What changes no result beyond rounding, and what makes a value of another dtype.
SCALES = ["lhs_scale", "rhs_scale", "accumulate", "out_dtype"]
MISSING = {
    "flash_attention": ["block_map", "precision"],
    "matmul": ["split_k"],
    "fused_matmul": ["split_k"],
    "quantized_matmul": ["out_dtype"],
    "ragged_dot": SCALES,
    "fused_ragged_dot": ["lhs_scale", "rhs_scale", "out_dtype"],
    "ragged_contracting_dot": ["accumulate", "out_dtype"],
}
EXTRA = {
    "cross_entropy": ["vocabulary"],  # for a part of the words
    "paged_attention": ["cu_q_lens", "num_seqs", "return_logsumexp"],  # of `ragged_paged_attention`
}


def test_results_are_added_by_flags() -> None:
    """A function that may return several things has a flag `return_...` for all but the first; so has its reference.

    Attention to a cache in pages returns the cache if it gets keys to write.
    """
    for name, function in (*FUNCTIONS.items(), *REFERENCES.items()):
        flags = [p.name for p in parameters(function) if p.name.startswith("return_")]
        varies = " | " in re.sub(r"\[.*\]", "", str(inspect.signature(function).return_annotation))
        assert (bool(flags) or "new_keys: 'jax.Array | None'" in str(inspect.signature(function))) == varies, name
    flagged = {name for name, f in FUNCTIONS.items() if any(p.name.startswith("return_") for p in parameters(f))}
    assert flagged == {"cross_entropy", "flash_attention", "mla_attention", "ragged_paged_attention"}


def test_flags_of_references() -> None:
    hidden, weight, labels = jnp.ones((2, 3)), jnp.ones((3, 5)), jnp.array([0, 4])
    q = jnp.ones((1, 4, 2, 8))
    for folder, arrays in (("cross_entropy", (hidden, weight, labels)), ("flash_attention", (q, q, q))):
        reference, function = PACKAGES[folder].reference, FUNCTIONS[folder]
        one, (first, logsumexp) = reference(*arrays), reference(*arrays, return_logsumexp=True)
        np.testing.assert_array_equal(one, first)
        ours = function(*arrays, return_logsumexp=True, target="cpu:xla")
        assert [x.shape for x in ours] == [first.shape, logsumexp.shape]


# --- launch options and old names -------------------------------------------------------------------------------------


def test_launch_options_are_those_of_kernels() -> None:
    assert LAUNCH == ("block_m", "block_n", "block_k", "num_warps", "num_stages", "num_ctas")
    check_launch("f", dict.fromkeys(LAUNCH))


@pytest.mark.parametrize("name", ["block_x", "blok_m", "owned"])
def test_a_keyword_that_is_no_launch_option(name: str) -> None:
    x, sizes = jnp.ones((4, 4)), jnp.array([4])
    calls = (lambda **k: matmul(x, x, **k), lambda **k: ragged_contracting_dot(x, x, sizes, **k))
    for call in calls:
        with pytest.raises(ArgumentError, match=f"has no keyword argument '{name}'") as caught:
            call(**{name: 3})  # here
        assert f"{name} = 3 (int)" in caught.value.got and "block_m" in caught.value.expected
        assert "**k" in caught.value.loc.snippet()


def test_launch_options_reach_the_kernel() -> None:
    x = np.ones((5, 6), np.float32)
    np.testing.assert_array_equal(matmul(x, x.T, block_m=2, block_n=3, block_k=4, num_warps=4), x @ x.T)
    with pytest.raises(ArgumentError, match="block_m must be a static integer"):
        matmul(x, x.T, block_m=0)


def test_old_names_warn_at_the_line_of_the_call() -> None:
    x = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    with pytest.warns(DeprecationWarning, match="transpose_w= of matmul is transpose_rhs= now") as caught:
        out = matmul(x, x, transpose_w=True)  # here
    assert caught[0].filename == __file__
    np.testing.assert_array_equal(out, x @ x.T)


def test_an_argument_by_two_names() -> None:
    x = np.ones((2, 2), np.float32)
    with pytest.raises(ArgumentError, match="matmul is given one argument by two names") as caught:
        matmul(x, x, transpose_w=True, transpose_rhs=False)  # here
    assert "# here" in caught.value.loc.snippet()
    assert caught.value.fix == "drop transpose_w=, the name of earlier versions"


def test_renamed_keeps_the_signature() -> None:
    @renamed(old="new")
    def f(new: int = 1) -> int:
        """One."""
        return new

    assert str(inspect.signature(f)) == "(new: 'int' = 1) -> 'int'" and f.__doc__ == "One."
    with pytest.warns(DeprecationWarning, match="old= of f is new= now"):
        assert f(old=3) == 3


# --- imports ----------------------------------------------------------------------------------------------------------


def test_the_package_has_the_functions_of_its_folders() -> None:
    """The function is there after the import of its folder, too, which Python would store under the same name."""
    functions = {name for name in FUNCTIONS if name != "block_map"} | {"adamw_step", "QuantizedArray"}
    assert set(tilekern.kernels.__all__) == functions and functions <= set(dir(tilekern.kernels))
    for folder, package in PACKAGES.items():
        assert getattr(tilekern.kernels, folder) is getattr(package, folder)
        for name in functions & set(package.__all__):
            assert getattr(tilekern.kernels, name) is getattr(package, name)


def test_a_function_is_imported_when_it_is_asked_for() -> None:
    code = """
import sys
from tilekern.kernels import softmax
import tilekern.kernels.matmul.api
from tilekern.kernels import matmul, softmax as again
from tilekern.kernels.matmul import matmul as of_folder
assert softmax.__module__ == "tilekern.kernels.softmax.api" and again is softmax and matmul is of_folder
assert "tilekern.kernels.flash_attention" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_type_checkers_see_the_functions_that_are_imported_late() -> None:
    tree = ast.parse(Path(tilekern.kernels.__file__ or "").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert set(seen) == set(tilekern.kernels.__all__)
    for name, module in seen.items():
        assert getattr(importlib.import_module(str(module)), name) is getattr(tilekern.kernels, name)


def test_a_folder_exports_functions_and_their_definitions_alone() -> None:
    """No kernel of tiles, but for one that users call; no class, but for the type of an argument."""
    exported = {name: getattr(package, name) for package in PACKAGES.values() for name in package.__all__}
    assert {n for n, value in exported.items() if not inspect.isfunction(value)} == {"adamw_step", "BlockMap"}


NEW_FOLDERS = ("adamw_step", "index_scores", "mla_attention", "paged_attention", "sample")


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder not in NEW_FOLDERS])
def test_names_that_a_folder_exported_warn_at_the_import(folder: str) -> None:
    package = PACKAGES[folder]
    modules = inspect.getclosurevars(vars(package)["__getattr__"]).nonlocals["modules"]
    assert modules.keys().isdisjoint(package.__all__)
    for name, module in modules.items():
        line = f"from {package.__name__}.{module} import {name}`"
        with pytest.warns(DeprecationWarning, match=line) as caught:
            value = getattr(package, name)
        assert caught[0].filename == __file__
        assert value is getattr(importlib.import_module(f"{package.__name__}.{module}"), name)


def test_a_name_that_no_folder_has() -> None:
    for package in (tilekern.kernels, PACKAGES["softmax"]):
        with pytest.raises(AttributeError, match=f"^module '{re.escape(package.__name__)}' has no attribute 'sofmax'$"):
            getattr(package, "sofmax")  # noqa: B009


def test_a_function_has_the_names_of_its_folder_for_one_version() -> None:
    x = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    for name in ("softmax", "reference", "log_softmax"):
        with pytest.warns(DeprecationWarning, match=f"`from tilekern.kernels.softmax import {name}`") as caught:
            out = getattr(tilekern.kernels.softmax, name)(x)  # here
        assert caught[0].filename == __file__
        np.testing.assert_array_equal(out, getattr(PACKAGES["softmax"], name)(x))
