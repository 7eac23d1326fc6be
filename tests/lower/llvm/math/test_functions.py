import ctypes
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import llvmlite.binding as llvm
import mpmath as mp
import numpy as np
import pytest

from tilekern.ir.elementwise import TABLE
from tilekern.lower.llvm.ir_builder import Code, Module
from tilekern.lower.llvm.ir_values import I64, PTR, VOID, Reg, Type
from tilekern.lower.llvm.math.functions import emit_function
from tilekern.lower.llvm.runtime.machine import Machine

Array = np.ndarray[Any, Any]
Compiled = Callable[..., Array]

# The bounds in units of the last place, for float32 and for float64.
BOUNDS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(["exp", "exp2", "log", "cbrt"], (1, 1)),
    "expm1": (1.5, 2),
    **dict.fromkeys(["log2", "log1p", "atan", "asin", "acos", "atan2"], (0.51, 2)),
    **dict.fromkeys(["sinh", "cosh", "tan", "pow", "asinh", "acosh", "atanh", "erfc", "erf_inv", "lgamma"], (0.51, 2)),
    **dict.fromkeys(["logistic", "tanh", "sin", "cos", "rsqrt"], (1.9, 2)),
    "erf": (1.2, 2),
}
NAMES = sorted(BOUNDS)
UNARY = [name for name in NAMES if TABLE[name].arity == 1]


def of_host() -> Machine:
    features = llvm.get_host_cpu_features().flatten() + ",-prefer-256-bit"
    return Machine(llvm.get_default_triple(), llvm.get_host_cpu_name(), features, 64, 32)


def of_host_without_avx512() -> Machine:
    machine = of_host()
    return replace(machine, features=machine.features.replace("+avx512", "-avx512").replace("+avx10", "-avx10"))


HASWELL = Machine("x86_64-unknown-linux-gnu", "haswell", "+avx2,+fma", 32, 16)
SKYLAKE = Machine("x86_64-unknown-linux-gnu", "skylake-avx512", "+avx512f,+avx512dq,-prefer-256-bit", 64, 32)
ARM = Machine("aarch64-unknown-linux-gnu", "neoverse-n1", "+neon", 16, 32)
MACHINES = [of_host, of_host_without_avx512]


def module_of(machine: Machine, names: list[str], scalar: str, lanes: int) -> Module:
    """For each name a loop over arrays: void @name.loop(i64 size, ptr result, ptr operand, ...)."""
    module, type = Module(machine), Type(scalar, lanes)

    def loop(name: str) -> Callable[..., None]:
        def build(code: Code, size: Reg, result: Reg, *operands: Reg) -> None:
            def body(index: Reg) -> None:
                lanes = [code.load(type, code.gep(x, index, scalar)) for x in operands]
                computed = emit_function(code, name, *lanes)
                assert computed is not None and computed.type == type
                code.store(computed, code.gep(result, index, scalar))

            code.loop(0, size, max(type.lanes, 1), body)
            code.ret()

        return build

    for name in names:
        operands = [(f"x{n}", PTR) for n in range(TABLE[name].arity)]
        module.function(f"{name}.loop", [("size", I64), ("result", PTR), *operands], loop(name), VOID, "")
    return module


def target(machine: Machine) -> llvm.TargetMachine:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    made = llvm.Target.from_triple(machine.triple)
    return made.create_target_machine(cpu=machine.cpu, features=machine.features, opt=2)


@cache
def compiled(machine: Machine, scalar: str, lanes: int) -> tuple[Any, dict[str, Compiled]]:
    parsed = llvm.parse_assembly(module_of(machine, NAMES, scalar, lanes).text)
    engine = llvm.create_mcjit_compiler(parsed, target(machine))
    engine.finalize_object()

    def caller(name: str) -> Compiled:
        pointers = [ctypes.c_void_p] * (TABLE[name].arity + 1)
        entry = ctypes.CFUNCTYPE(None, ctypes.c_int64, *pointers)(engine.get_function_address(f"{name}.loop"))

        def call(*operands: Array) -> Array:
            size = operands[0].size
            padded = [np.pad(x, (0, -size % max(lanes, 1)), constant_values=1) for x in operands]
            result = np.empty_like(padded[0])
            entry(result.size, result.ctypes.data, *(x.ctypes.data for x in padded))
            return result[:size]

        return call

    return engine, {name: caller(name) for name in NAMES}


def run(machine: Machine, lanes: int, name: str, *operands: Array) -> Array:
    scalar = "float" if operands[0].dtype == np.float32 else "double"
    return compiled(machine, scalar, lanes)[1][name](*operands)


def neighbours(values: Array) -> Array:
    """Each value, with the three numbers on each side of it, and all that negated."""
    bits = values.view(f"i{values.itemsize}")[:, None] + np.arange(-3, 4, dtype=f"i{values.itemsize}")
    near = np.abs(bits).view(values.dtype).ravel()
    return np.concatenate([near, -near])


def edges(dtype: type) -> Array:
    info = np.finfo(dtype)
    bounds = [0, info.smallest_subnormal, info.smallest_normal, info.max, info.eps, math.inf]
    small = [0.25, 0.5, 0.625, 0.75, 0.9, 1, 1.5, 2, 2.5, 3, 4, 5, 9.01, 10.2, 65536, 2**24, 2**30, 2.0**53]
    # Where powers and their inverses overflow, are subnormal, and are 0.
    ranges = [88.722839, 87.336545, 103.27893, 103.97208, 126, 127, 128, 149, 150, 151]
    ranges += [708.39642, 709.782713, 744.4400719, 745.1332191, 1022, 1023, 1024, 1074, 1075, 1076]
    turns = [n * math.pi / 4 for n in (*range(1, 40), 20861, 41721, 41722, 83443)]
    return np.append(neighbours(np.array([*bounds, *small, *ranges, *turns], dtype)), dtype(math.nan))


def inputs(dtype: type, size: int) -> Array:
    """Random bits, which have every exponent, ranges in which functions have their features, and edges."""
    rng = np.random.default_rng(size)
    bits = rng.integers(0, 2 ** (8 * dtype().itemsize), size, f"u{dtype().itemsize}").view(dtype)
    narrow = [rng.normal(0, scale, size // 2).astype(dtype) for scale in (0.5, 3, 30, 1000)]
    about_1 = (1 + rng.normal(0, 0.01, size // 2)).astype(dtype)
    return np.concatenate([bits, *narrow, about_1, edges(dtype)])


def pairs(dtype: type, size: int) -> tuple[Array, Array]:
    """Operands of `pow` and `atan2`."""
    rng = np.random.default_rng(size)
    some = [0, 1, 2, 3, 0.5, 2.5, 127, 128, 149, 150, 2**24 - 1, 2**24, 1 + 2**-23, 1 - 2**-24, math.inf]
    some += [1e-45, 1.1754944e-38, 3.4028235e38]
    signed = np.array([*some, *(-x for x in some), math.nan], dtype)
    first, second = (x.ravel() for x in np.meshgrid(signed, signed))
    bits = rng.integers(0, 2 ** (8 * dtype().itemsize), (2, size), f"u{dtype().itemsize}").view(dtype)
    base = np.concatenate([np.exp(rng.normal(0, 3, size)), 1 + rng.normal(0, 1e-3, size), rng.integers(-9, 9, size)])
    power = np.concatenate([rng.normal(0, 20, size), rng.normal(0, 3e4, size), rng.integers(-40, 40, size)])
    x, y = ([a, b, c.astype(dtype)] for a, b, c in ((first, bits[0], base), (second, bits[1], power)))
    return np.concatenate(x), np.concatenate(y)


def operands_of(name: str, dtype: type, size: int) -> tuple[Array, ...]:
    return pairs(dtype, size // 4) if TABLE[name].arity == 2 else (inputs(dtype, size),)


def units32(got: Array, want: Array) -> Array:
    """Errors of float32 results against float64, in units of the last place; infinite where special values differ."""
    rounded = want.astype(np.float32)
    finite = np.isfinite(rounded) & np.isfinite(got)
    units = np.abs(got - want) / np.spacing(np.abs(rounded)).astype(np.float64)
    signed = (got != 0) | (rounded != 0) | (np.signbit(got) == np.signbit(rounded))
    # The largest number may stand for infinity if the exact result is about half a unit above it.
    close = np.abs(got.view(np.int32).astype(np.int64) - rounded.view(np.int32)) <= 1
    same = (got == rounded) | (np.isnan(got) & np.isnan(rounded)) | (close & np.isfinite(want))
    return np.where(finite & signed, units, np.where(same & signed, 0, np.inf))


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", NAMES)
def test_float32_is_right_everywhere(name: str, machine: Callable[[], Machine]) -> None:
    operands = operands_of(name, np.float32, 1 << 14 if name in ("erf_inv", "lgamma") else 1 << 17)
    got = run(machine(), 16, name, *operands)
    with np.errstate(all="ignore"):
        units = units32(got, TABLE[name].meaning(*(x.astype(np.float64) for x in operands)))
    worst = int(np.argmax(units))
    assert units[worst] <= BOUNDS[name][0], (name, [x[worst] for x in operands], got[worst])


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
def test_huge_angles_are_reduced_exactly(name: str, machine: Callable[[], Machine]) -> None:
    """Also in vectors that have other numbers besides, and where a multiple of π/2 is as near as can be."""
    nearest = np.array([16367173 * 2.0**72, 13176796 * 2.0**2, 16252128 * 2.0**103], np.float32)
    spread = np.geomspace(1e4, 3.4e38, 4001).astype(np.float32)
    x = np.concatenate([neighbours(nearest), neighbours(spread), np.linspace(-9, 9, 1000).astype(np.float32)])
    np.random.default_rng(1).shuffle(x)
    units = units32(run(machine(), 16, name, x), TABLE[name].meaning(x.astype(np.float64)))
    assert units.max() <= BOUNDS[name][0], (name, x[np.argmax(units)])


EXACT: dict[str, Callable[..., Any]] = {
    "exp2": lambda x: mp.power(2, x),
    "log2": lambda x: mp.log(x) / mp.log(2),
    "cbrt": lambda x: mp.sign(x) * mp.cbrt(abs(x)),
    "logistic": lambda x: 1 / (1 + mp.exp(-x)),
    "rsqrt": lambda x: 1 / mp.sqrt(x),
    "pow": mp.power,
    "erf_inv": mp.erfinv,
    "lgamma": lambda x: mp.log(abs(mp.gamma(x))) if x < 100 else mp.loggamma(x),
}


def exact(name: str, *operands: float) -> Any:
    """The value to 160 bits, or None where what NumPy says is to be met: at infinities, poles, far outside."""
    usual = float(TABLE[name].meaning(*(np.array([x]) for x in operands))[0])
    far = usual == 0 and max(map(abs, operands)) > 1e4
    if far or not math.isfinite(usual) or not all(map(math.isfinite, operands)):
        return None
    with mp.workprec(160 if abs(operands[0]) < 1e18 else 1300):
        return EXACT.get(name, getattr(mp, name, None))(*map(mp.mpf, operands))


def units64(name: str, got: Array, *operands: Array) -> Array:
    """Errors as by `units32`, against numbers of many digits."""
    usual = TABLE[name].meaning(*operands)
    right = (got == usual) | (np.isnan(got) & np.isnan(usual))
    units, wanted = np.where(right, 0, np.inf), usual.copy()
    for index, numbers in enumerate(zip(*operands, strict=True)):
        value = exact(name, *map(float, numbers))
        if value is not None and np.isfinite(got[index]):
            units[index] = float(abs(mp.mpf(float(got[index])) - value) / float(np.spacing(abs(float(value)))))
            wanted[index] = float(value) or usual[index]
    return np.where(np.isnan(got) | (np.signbit(got) == np.signbit(wanted)), units, np.inf)


def assert_float64(name: str, *operands: Array) -> None:
    with np.errstate(all="ignore"):
        for machine in MACHINES:
            got = run(machine(), 8, name, *operands)
            units = units64(name, got, *operands)
            worst = int(np.argmax(units))
            assert units[worst] <= BOUNDS[name][1], (name, [x[worst] for x in operands], got[worst])


@pytest.mark.parametrize("name", NAMES)
def test_float64_is_right(name: str) -> None:
    operands = operands_of(name, np.float64, 1 << 10)
    keep = np.random.default_rng(5).permutation(operands[0].size)[: 300 if name in ("erf_inv", "lgamma") else 1000]
    assert_float64(name, *(x[keep] for x in operands))


def zeros_of_lgamma() -> list[float]:
    """1, 2, and those on both sides of the poles from -3 to -16; beyond there is no float64 between pole and zero."""
    starts = [-2.457, -2.7477, -3.1436, *(-n + side / math.factorial(n) for n in range(4, 17) for side in (1, -1))]
    with mp.workprec(160):
        found = [mp.findroot(lambda x: abs(mp.gamma(x)) - 1, x, solver="newton") for x in map(mp.mpf, starts)]
    return [1.0, 2.0, *map(float, found)]


def test_lgamma_of_float64_is_right_near_its_zeros() -> None:
    zeros = np.array(zeros_of_lgamma())[:, None]
    to_pole = np.where(zeros > 0, 1, np.abs(zeros - np.rint(zeros)))
    away = np.concatenate([2.0 ** -np.arange(3, 48, 4) * to_pole, np.arange(4) * np.spacing(np.abs(zeros))], axis=1)
    assert_float64("lgamma", np.concatenate([zeros + away, zeros - away]).ravel())


def test_lgamma_of_float64_is_right_where_its_formula_changes() -> None:
    whole = np.arange(-24.0, 18.0)
    bounds = np.append(np.concatenate([whole, whole + 0.5]), [2.0**-60, -(2.0**-60), 2.0**52])
    near = np.concatenate([bounds, np.nextafter(bounds, math.inf), np.nextafter(bounds, -math.inf)])
    assert_float64("lgamma", near)
    ends = np.array([2.556348163871691e305, np.nextafter(2.556348163871691e305, math.inf), -math.inf, -(2.0**53)])
    assert np.array_equal(np.isfinite(run(of_host(), 8, "lgamma", ends)), [True, False, False, False])


def test_erfc_of_float64_is_right_in_its_tail() -> None:
    x = np.linspace(0, 27.3, 801)
    assert_float64("erfc", np.concatenate([x, -x[:200], np.linspace(26.5, 27.3, 100)]))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", NAMES)
def test_all_numbers_of_lanes_give_the_same_bits(name: str, dtype: type) -> None:
    operands = operands_of(name, dtype, 1 << 10)
    scalar = run(of_host(), 0, name, *operands)
    for machine, lanes in [(of_host(), 2), (of_host(), 16), (of_host(), 32), (of_host_without_avx512(), 16)]:
        vector = run(machine, lanes, name, *operands)
        same = scalar.view(f"i{scalar.itemsize}") == vector.view(f"i{scalar.itemsize}")
        assert np.all(same | (np.isnan(scalar) & np.isnan(vector))), (name, lanes)


@pytest.mark.parametrize("machine", [HASWELL, SKYLAKE, ARM], ids=lambda m: m.cpu)
@pytest.mark.parametrize("scalar", ["float", "double"])
def test_compiles_for_other_machines(machine: Machine, scalar: str) -> None:
    parsed = llvm.parse_assembly(module_of(machine, NAMES, scalar, machine.vector_bytes // 4).text)
    parsed.verify()
    assert "exp.loop" in target(machine).emit_assembly(parsed)


def test_float32_calls_nothing() -> None:
    for machine in (HASWELL, SKYLAKE, ARM):
        text = module_of(machine, [name for name in NAMES if name != "lgamma"], "float", 16).text
        declared = [line.split("@")[1] for line in text.splitlines() if line.startswith("declare")]
        assert all(name.startswith("llvm.") for name in declared)


@pytest.mark.parametrize(("name", "count"), [("exp", 12), ("exp2", 9)])
def test_powers_are_few_instructions_on_avx512(name: str, count: int) -> None:
    code = Code(Module(SKYLAKE))
    emit_function(code, name, Reg("%x", Type("float", 16)))
    assert len(code.lines) == count


def test_other_names_are_left_to_others() -> None:
    for scalar in ("float", "double"):
        assert emit_function(Code(Module(HASWELL)), "sqrt", Reg("%x", Type(scalar, 8))) is None
