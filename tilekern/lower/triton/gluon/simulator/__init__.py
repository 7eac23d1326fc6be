"""Runs the text of a warp-specialised program on this machine, and finds races and deadlocks in it.

machine   thread blocks: roles in turns, asynchronous copies and products, barriers, clocks
shared    shared memory: its reads and writes, and their order
arrays    arrays in global memory, by descriptors and by pointers
tiles     tiles in registers
functions Gluon's functions of tiles, as far as our programs call them
language  Gluon's modules, for one thread block
run       a program and its inputs → its outputs
"""
