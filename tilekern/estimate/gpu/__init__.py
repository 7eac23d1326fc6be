"""A static model of the cycles that a kernel takes on an NVIDIA GPU, from its SASS.

sass        the text of the disassembler
scalar      values of integers and predicates; `rules`: the values that instructions compute
lanes       values that threads tell each other before the first branch
walk        the way of a warp, decided by these values; `effects`: its arrivals, waits and copies
passages    loops that are passed in the same way again
rates       GPUs, units and latencies, each with its source
work        the cost of an instruction
shorten     leaves out iterations that repeat others
machine     a multiprocessor that runs the walks of its warps
loops       cycles and work of an iteration
estimation  the whole model, for a launch
"""

from tilekern.estimate.gpu.estimation import LINES, Launch, LaunchEstimate, estimate

__all__ = ["LINES", "Launch", "LaunchEstimate", "estimate"]
