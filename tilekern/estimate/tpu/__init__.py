"""Static speed of TPU programs, without a TPU.

libtpu compiles ahead of time and dumps its final VLIW bundles; executing their scalar instructions gives the exact
number of bundles, the use of each slot and the bytes of each DMA. Only the wait for DMAs is a model.

estimate    a program to a record per kernel
child       the process that compiles
hlo         the kernels that the program runs, and the constants that they prefetch
bundles     the text of the bundles; `slots`: the table of slots
simulate    the scalar unit; `scalar`: the results of its instructions
chips       clocks, bandwidths, units
evaluate    the integers that XLA computes from constants, and the numbers of its loops' iterations
"""
