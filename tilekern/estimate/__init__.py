"""Estimates of the time of compiled kernels, without the hardware that they are compiled for.

by_target   the estimate of a lowered program; `result`: the record of it; `drawings`, `quantities`: its form
data_loops  loops that run as often as the values of arrays say
on_gpu      cuda:…, by the cycle model of `gpu`
on_tpu      tpu:…, by the bundles of `tpu`
on_cpu      cpu:llvm, by a roofline of rates that `cpu` measures on this machine
"""

from tilekern.estimate.by_target import estimate
from tilekern.estimate.result import Estimate

__all__ = ["Estimate", "estimate"]
