"""Warp-specialised programs for Hopper, in Gluon, the lower language of Triton.

groups        programs that share a thread block, and the loads that they share
plan          rings of tiles in shared memory, barriers, products that are delayed; refusals
leading_rows  masks that keep the first rows of a tile
rotation      loops whose last products are computed an iteration later
layouts       layouts of tiles in registers
roles         the base of both roles: the loop over groups of programs, bounds, places in rings
loader        the role of the warp that loads
products      products of warpgroups, and layouts of the values that are computed with products
computer      the role of the warpgroups that compute
build         legalize, plan and emit in this order: a Func → a `Program`
"""
