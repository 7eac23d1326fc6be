"""Times, amounts and parts as people write them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """A time with its unit.

    Example:
      >>> duration(2.5e-6), duration(0.012)
      ('2.50 µs', '12.0 ms')
    """
    return f"{amount(seconds)}s"


def amount(number: float) -> str:
    """A number with three digits and a prefix of the SI, ready for its unit.

    Example:
      >>> amount(0), amount(1536), amount(2.5e-6)
      ('0 ', '1.54 k', '2.50 µ')
    """
    if not number:
        return "0 "
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m")):
        if number >= factor * 0.9995:
            return f"{_three_digits(number / factor)} {prefix}"
    return f"{_three_digits(number * 1e6)} µ" if number >= 0.9995e-6 else f"{_three_digits(number * 1e9)} n"


def _three_digits(number: float) -> str:
    return f"{number:.2f}" if number < 9.995 else f"{number:.1f}" if number < 99.95 else f"{number:.0f}"


def percent(part: float) -> str:
    """A part of a whole as a percentage.

    Example:
      >>> percent(0.256), percent(0.004)
      ('26 %', '0.4 %')
    """
    return f"{100 * part:.1f} %" if 0 < part < 0.0995 else f"{100 * part:.0f} %"
