"""Faults in derivatives that are derived from the block IR."""

from tests.mutants.mutant import Mutant

_KERNELS = ("tests/autodiff/test_kernels.py",)
_PROGRAMS = ("tests/autodiff/test_kernels.py", "tests/autodiff/test_random_programs.py")

MUTANTS = (
    Mutant(
        "overwrites: the last store of an element gets no cotangent",
        "tilekern/autodiff/transpose.py",
        'make.of("le", last,',
        'make.of("lt", last,',
        _KERNELS,
    ),
    Mutant(
        "overwrites: stores of other iterations count as later",
        "tilekern/autodiff/overwrites.py",
        "self._number(op.body, first, (*strides, (op, span)))",
        "self._number(op.body, first, strides)",
        ("tests/autodiff/test_overwrites.py",),
    ),
    Mutant(
        "sites: a diagonal covers its square",
        "tilekern/ir/analysis/sites.py",
        "if len(set(used)) < len(used):",
        "if len(used) < 0:",
        ("tests/autodiff/test_random_programs.py", "tests/ir/analysis/test_sites.py"),
    ),
    Mutant(
        "backward: addends of several tiles are stored",
        "tilekern/autodiff/backward.py",
        "if is_injective(site, site.axes):",
        "if is_injective(site, ()):",
        _KERNELS,
    ),
    Mutant(
        "transpose: loops whose carries are not sums run forward",
        "tilekern/autodiff/transpose.py",
        "reverse = op.reverse != ordered",
        "reverse = op.reverse",
        _KERNELS,
    ),
    Mutant(
        "saved: tiles that did not run leave their states unwritten",
        "tilekern/autodiff/saved.py",
        'return "out" if whole else "zeros"',
        'return "out"',
        _PROGRAMS,
    ),
    Mutant(
        "merge: the first of two merged additions is lost",
        "tilekern/autodiff/merge.py",
        'total = make.of("add", early_value, _masked(op.value, op.mask, make))',
        "total = _masked(op.value, op.mask, make)",
        _KERNELS,
    ),
    Mutant(
        "swap: an axis is not summed over",
        "tilekern/autodiff/swap.py",
        "total = self._make.convert(self._sum(serial, self._zeros()), dtype)",
        "total = self._make.convert(self._sum(serial[1:], self._zeros()), dtype)",
        _KERNELS,
    ),
    Mutant(
        "elementwise: the derivative of exp2 lacks its factor",
        "tilekern/autodiff/elementwise.py",
        '"exp2": _times(lambda at: at.of("mul", at.result, math.log(2))),',
        '"exp2": _times(lambda at: at.result),',
        ("tests/autodiff/test_rules.py",),
        modes="derivatives",
    ),
    Mutant(
        "zero tails: any factor is finite behind the end",
        "tilekern/autodiff/zero_tails.py",
        "is_exact = active[0].is_exact and stays and self.finite.issuperset(factors)",
        "is_exact = active[0].is_exact and (stays or bool(factors))",
        ("tests/autodiff/test_zero_tails.py",),
    ),
    Mutant(
        "zero tails: a product needs 0 on one side alone",
        "tilekern/autodiff/zero_tails.py",
        "if y not in self._facts.finite:",
        "if y in self._facts.linear:",
        ("tests/autodiff/test_zero_tails.py",),
    ),
)
