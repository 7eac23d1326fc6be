from dataclasses import replace
from itertools import pairwise

from tilekern.lower.target import TARGETS
from tilekern.lower.triton.chip import CHIPS, chip_of
from tilekern.lower.triton.vendor import AMD, NVIDIA

NVIDIAS = [chip for chip in CHIPS.values() if chip.vendor is NVIDIA]


def test_every_gpu_target_has_its_chip() -> None:
    assert {name for name, target in TARGETS.items() if target.backend == "triton"} == set(CHIPS)
    for name, chip in CHIPS.items():
        model = f"gfx{chip.capability}" if chip.vendor is AMD else f"sm_{chip.capability}"
        assert name == chip.name == f"{chip.vendor.platform}:{model}"
        assert TARGETS[name].platform == chip.vendor.platform


def test_newer_chips_can_do_what_older_ones_can() -> None:
    """Those for workstations have less shared memory and no copies of operands, but all dtypes."""
    chips = sorted(NVIDIAS, key=lambda c: c.capability)
    for older, newer in pairwise(chips):
        for ability in ("float8", "bf16_atomics"):
            assert getattr(older, ability) <= getattr(newer, ability)
    large = [chip for chip in chips if chip.capability in (80, 90, 100, 103)]
    for older, newer in pairwise(large):
        for ability in ("tma", "shared_bytes", "shared_bytes_per_core", "bandwidth", "flops"):
            assert getattr(older, ability) <= getattr(newer, ability)
    assert all(c.shared_bytes < c.shared_bytes_per_core for c in chips)


def test_portable_code_fits_every_chip() -> None:
    portable = chip_of(replace(TARGETS["cuda:sm_80"], portable=True))
    assert portable.capability == min(chip.capability for chip in NVIDIAS)
    assert portable.shared_bytes == min(chip.shared_bytes for chip in NVIDIAS) == 99 << 10
    assert not any((portable.tma, portable.float8, portable.bf16_atomics))
    assert chip_of(TARGETS["cuda:sm_80"]) is CHIPS["cuda:sm_80"]
