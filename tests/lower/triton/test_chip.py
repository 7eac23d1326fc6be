from itertools import pairwise

from tilekern.lower.target import TARGETS
from tilekern.lower.triton.chip import CHIPS


def test_every_gpu_target_has_its_chip() -> None:
    assert {name for name, target in TARGETS.items() if target.backend == "triton"} == set(CHIPS)
    for name, chip in CHIPS.items():
        assert name == chip.name == f"cuda:sm_{chip.capability}"


def test_newer_chips_can_do_what_older_ones_can() -> None:
    chips = sorted(CHIPS.values(), key=lambda c: c.capability)
    for older, newer in pairwise(chips):
        for ability in ("tma", "float8", "bf16_atomics", "shared_bytes", "shared_bytes_per_core"):
            assert getattr(older, ability) <= getattr(newer, ability)
    assert all(c.shared_bytes < c.shared_bytes_per_core for c in chips)
