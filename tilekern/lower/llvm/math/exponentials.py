"""exp, exp2 and log of float32 and float64, which most other functions are made of.

AVX-512 has instructions for range reduction and scaling, which handle infinities, subnormals and overflow. Other
machines, and vectors that fill no register, compute the same bits by integer arithmetic.

Coefficients: minimax of the result's relative error (Remez's algorithm); float32's are rounded one by one, and the
higher ones fitted again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilekern.ir.records import record
from tilekern.lower.llvm.ir_builder import Code
from tilekern.lower.llvm.ir_values import I32, Reg, Type, constant


@record
class Format:
    """Constants of a floating-point format.

    Attributes:
      mantissa: bits of the mantissa.
      bias: the bias of the exponent.
      exp_range: the range of x outside of which e^x is 0 or infinity.
      exp2_range: the range of x outside of which 2^x is 0 or infinity.
      ln2: ln 2 in two parts, the second one positive.
      exp: (e^r - 1 - r) / r² for |r| <= ln(2) / 2, the lowest coefficient first.
      exp2: (2^r - 1) / r for |r| <= 1/2.
    """

    mantissa: int
    bias: int
    exp_range: tuple[float, float]
    exp2_range: tuple[float, float]
    ln2: tuple[float, float]
    exp: tuple[float, ...]
    exp2: tuple[float, ...]

    @property
    def magic(self) -> float:
        """Adding this to a small number rounds it to an integer, whose sum with twice the bias is in the low bits."""
        return 1.5 * 2.0**self.mantissa + 2 * self.bias

    @property
    def smallest_normal(self) -> float:
        """The smallest positive number with a full mantissa."""
        return 2.0 ** (1 - self.bias)


_FLOAT = Format(
    mantissa=23,
    bias=127,
    exp_range=(-104.0, 89.0),
    exp2_range=(-151.0, 129.0),
    ln2=(0.693147122859954833984375, 5.7699990475433893e-08),
    exp=(0.4999999403953552, 0.16666516661643982, 0.04166810214519501, 0.00836920365691185, 0.001383927185088396),
    exp2=(
        *(0.6931472420692444, 0.24022655189037323, 0.05550272390246391),
        *(0.009617063216865063, 0.0013418070739135146, 0.0001582135009812191),
    ),
)
_DOUBLE = Format(
    mantissa=52,
    bias=1023,
    exp_range=(-746.0, 710.0),
    exp2_range=(-1076.0, 1025.0),
    ln2=(0.6931471805599453, 2.3190468138462996e-17),
    exp=(
        *(0.500000000000001, 0.16666666666666674, 0.04166666666652284, 0.008333333333322273, 0.0013888888947561125),
        *(0.00019841269886391246, 2.480148762007886e-05, 2.7557242562810524e-06, 2.763254483406165e-07),
        2.5109964597168438e-08,
    ),
    exp2=(
        *(0.6931471805599453, 0.24022650695910072, 0.055504108664821736, 0.009618129107628562, 0.0013333558146381736),
        *(0.00015403530393171802, 1.5252733864848079e-05, 1.3215487003445792e-06, 1.0178047529727045e-07),
        *(7.054814817145163e-09, 4.4572395583745324e-10, 2.5855273203420683e-11),
    ),
)
_FORMATS = {"float": _FLOAT, "double": _DOUBLE}

_LOG_FLOAT = (
    *(-0.5, 0.3333345949649811, -0.2500014007091522, 0.19990412890911102, -0.16645455360412598),
    *(0.14481954276561737, -0.13180892169475555, 0.10477323830127716, -0.04499651864171028),
)
"""(log(1 + f) - f) / f² for -1/4 <= f <= 1/2."""
_LOG_DOUBLE = (
    *(0.666666666666666, 0.4000000000005674, 0.2857142855580566, 0.22222224299490248),
    *(0.18181665677422656, 0.15391118811581692, 0.13173479043558162, 0.13843879624228048),
)
"""(log((1 + s) / (1 - s)) / s - 2) / s² by powers of s², |s| <= 1/5."""


def format_of(x: Reg) -> Format:
    """The format of the lanes."""
    return _FORMATS[x.type.scalar]


def polynomial(code: Code, x: Reg, coefficients: Sequence[float]) -> Reg:
    """A polynomial by Horner's rule; the lowest coefficient comes first."""
    total = constant(coefficients[-1], x.type)
    for c in reversed(coefficients[:-1]):
        total = code.fma(x, total, c)
    return total


def absolute(code: Code, x: Reg) -> Reg:
    """|x|."""
    return code.intrinsic("llvm.fabs", x)


def with_sign(code: Code, size: Reg, x: Reg) -> Reg:
    """`size` with the sign of `x`."""
    return code.intrinsic("llvm.copysign", size, x)


def clamp(code: Code, x: Reg, low: float | None = None, high: float | None = None) -> Reg:
    """`x` within bounds; NaN stays."""
    if low is not None:
        x = code.select(code.compare("fcmp ogt", low, x), low, x)
    if high is not None:
        x = code.select(code.compare("fcmp olt", high, x), high, x)
    return x


def exp(code: Code, x: Reg) -> Reg:
    """e^x = 2^n e^r with n = round(x / ln 2)."""
    n, r = split_exp(code, x)
    p = code.fma(r, code.fma(r, polynomial(code, r, format_of(x).exp), 1.0), 1.0)
    return scale(code, p, n)


def exp2(code: Code, x: Reg) -> Reg:
    """2^x = 2^n 2^r with n = round(x)."""
    form = format_of(x)
    if has_avx512(code, x.type):
        r = avx512(code, "reduce", x, constant(_TO_NEAREST, I32))
        n = code.binary("fsub", x, r)
    else:
        x = clamp(code, x, *form.exp2_range)
        n = code.intrinsic("llvm.rint", x)
        r = code.binary("fsub", x, n)
    return scale(code, code.fma(r, polynomial(code, r, form.exp2), 1.0), n)


def split_exp(code: Code, x: Reg) -> tuple[Reg, Reg]:
    """n and r = x - n ln 2 of `exp`."""
    form = format_of(x)
    wide = has_avx512(code, x.type)
    if not wide:
        x = clamp(code, x, *form.exp_range)
    n = code.intrinsic("llvm.rint", code.binary("fmul", x, 1 / math.log(2)))
    r = code.fma(n, -form.ln2[0], x)
    r = code.fma(n, -form.ln2[1], r)
    # Far outside of the range, r only has to be finite: the scaling gives 0 or infinity.
    return n, avx512(code, "range", r, constant(1.0, r.type), constant(_SMALLER_SIZE, I32)) if wide else r


def scale(code: Code, x: Reg, n: Reg) -> Reg:
    """x 2^n, rounded once, for 1/2 < x <= 2 and an integer n. Without AVX-512, n must be about in `exp2_range`."""
    if has_avx512(code, x.type):
        return avx512(code, "scalef", x, n)
    form = format_of(x)
    bits = code.cast("bitcast", code.binary("fadd", n, form.magic), x.type.integer.scalar)
    # The exponent bits of 2^(n/2) and of 2^(n - n/2); each has half of the two biases.
    half = code.binary("shl", code.binary("lshr", bits, 1), form.mantissa)
    other_half = code.binary("sub", code.binary("shl", bits, form.mantissa), half)
    for power in (half, other_half):
        x = code.binary("fmul", x, code.cast("bitcast", power, x.type.scalar))
    return x


def expm1(code: Code, x: Reg, power: float = 1.0) -> Reg:
    """(e^x - 1) times a power of two, 1 or 1/2, for |x| <= 100."""
    n, r = split_exp(code, x)
    scaled = scale(code, constant(power, x.type), n)
    near = code.fma(code.binary("fmul", r, r), polynomial(code, r, format_of(x).exp), r)
    return with_sign(code, code.fma(scaled, near, code.binary("fsub", scaled, power)), x)


def log(code: Code, x: Reg) -> Reg:
    """log x = e ln 2 + log m with x = 2^e m and 3/4 <= m < 3/2."""
    m, e = split_log(code, x)
    return _at_edges_of_log(code, x, _sum_of_log(code, code.binary("fsub", m, 1.0), e))


def log1p(code: Code, x: Reg) -> Reg:
    """log(1 + x) of float64, to float32's precision."""
    above = code.binary("fadd", x, 1.0)
    m, e = split_log(code, above)
    f = code.select(code.compare("fcmp olt", absolute(code, x), 0.25), x, code.binary("fsub", m, 1.0))
    return with_sign(code, _at_edges_of_log(code, above, _sum_of_log(code, f, e)), x)


def _sum_of_log(code: Code, f: Reg, e: Reg) -> Reg:
    """e ln 2 + log(1 + f), for float64 as in FreeBSD's e_log.c, through s = f / (2 + f)."""
    high, low = format_of(f).ln2
    square = code.binary("fmul", f, f)
    if f.type.scalar == "float":
        tail = code.binary("fmul", polynomial(code, f, _LOG_FLOAT), square)
        return code.fma(e, high, code.binary("fadd", f, code.fma(e, low, tail)))
    s = code.binary("fdiv", f, code.binary("fadd", f, 2.0))
    z = code.binary("fmul", s, s)
    half = code.binary("fmul", square, 0.5)
    evaluate_series = code.fma(z, polynomial(code, z, _LOG_DOUBLE), half)
    tail = code.binary("fsub", half, code.fma(s, evaluate_series, code.binary("fmul", e, low)))
    return code.fma(e, high, code.binary("fsub", f, tail))


def split_log(code: Code, x: Reg) -> tuple[Reg, Reg]:
    """m and e of `log`; e is as infinite as the result on AVX-512."""
    form = format_of(x)
    if has_avx512(code, x.type):
        m = avx512(code, "getmant", x, constant(_FROM_3_4, I32))
        e = avx512(code, "getexp", x)
        return m, code.select(code.compare("fcmp olt", m, 1.0), code.binary("fadd", e, 1.0), e)
    lift = form.mantissa + 2
    tiny = code.compare("fcmp olt", x, form.smallest_normal)
    bits = code.cast("bitcast", code.select(tiny, code.binary("fmul", x, 2.0**lift), x), x.type.integer.scalar)
    from_3_4 = code.binary("sub", bits, ((form.bias << 1) - 1) << (form.mantissa - 1))
    exponent = code.binary("ashr", from_3_4, form.mantissa)
    m = code.cast("bitcast", code.binary("sub", bits, code.binary("shl", exponent, form.mantissa)), x.type.scalar)
    # A float that is so large that its low bits count units.
    units = 1.5 * 2.0**form.mantissa
    whole = code.cast("bitcast", constant(units, x.type), x.type.integer.scalar)
    e = code.binary("fsub", code.cast("bitcast", code.binary("add", whole, exponent), x.type.scalar), units)
    return m, code.select(tiny, code.binary("fsub", e, float(lift)), e)


def _at_edges_of_log(code: Code, x: Reg, result: Reg) -> Reg:
    """The logarithm of 0, infinity, negative numbers and NaN, else `result`."""
    if has_avx512(code, x.type):
        return result
    edge = code.select(code.compare("fcmp oeq", x, 0.0), constant(-math.inf, x.type), math.nan)
    result = code.select(code.compare("fcmp ogt", x, 0.0), result, edge)
    return code.select(code.compare("fcmp oeq", x, math.inf), math.inf, result)


# Immediate operands, from Intel's Software Developer's Manual, volume 2: of vreduce (the remainder of rounding to the
# nearest), of vrange (the operand of the smaller size; a number rather than NaN), and of vgetmant (of the interval from
# 3/4 to 3/2; NaN if negative).
_TO_NEAREST, _SMALLER_SIZE, _FROM_3_4 = 0b0000, 0b0010, 0b1011


def has_avx512(code: Code, type: Type) -> bool:
    """True if a vector fills one, two, four, ... AVX-512 registers."""
    features = code.module.machine.features.split(",")
    registers, remainder = divmod(type.lanes * type.bits, 512)
    return "+avx512f" in features and "+avx512dq" in features and not remainder and registers.bit_count() == 1


def avx512(code: Code, name: str, first: Reg, *rest: Reg) -> Reg:
    """Emit an AVX-512 instruction for vectors, with its immediate operand if it has one."""
    lanes = first.type.lanes
    if lanes * first.type.bits > 512:
        halves = [range(lanes // 2), range(lanes // 2, lanes)]
        low, high = (avx512(code, name, *(_part(code, x, half) for x in (first, *rest))) for half in halves)
        return code.shuffle(low, high, range(lanes))
    instruction = f"llvm.x86.avx512.mask.{name}.{'ps' if first.type.bits == 32 else 'pd'}.512"
    # Trailing operands: the values of masked lanes, the mask, and the rounding mode (4: the current one).
    all_lanes = constant((1 << lanes) - 1, Type(f"i{lanes}"))
    operands = (first, *rest, constant(0, first.type), all_lanes, constant(4, I32))
    return code.call_external(instruction, first.type, *operands)


def _part(code: Code, x: Reg, lanes: range) -> Reg:
    """Some lanes of a vector, or a scalar unchanged."""
    return code.shuffle(x, x, lanes) if x.type.lanes else x
