"""Warp-specialised programs for Hopper, in Gluon, the lower language of Triton.

groups        programs that share a thread block, and the loads that they share
refusals      the Funcs that this emitter does not take
channels      the loads that share a ring of places in shared memory
delays        products that are computed an iteration later, if registers suffice
places        the stages of the rings, and the places of stored tiles
plan          the decisions of the modules above, in order
leading_rows  masks that keep the first rows of a tile
rotation      loops whose last products are computed an iteration later
layouts       layouts of tiles in registers
rings         places in the rings and their barriers, as expressions of a role's program
flights       products that were started and not waited for
roles         the base of both roles: the loop over groups of programs, and bounds
loader        the role of the warp that loads
products      the operands of products, trimmed and cast tiles, and layouts of the values that products compute
computer      the role of the warpgroups that compute
build         legalize, plan and emit in this order: a Func → a `Program`
"""
