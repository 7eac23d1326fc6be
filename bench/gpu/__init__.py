"""Proof and speed of the kernels on an NVIDIA GPU: `python -m bench.gpu --out FOLDER`.

plan        what is done, most important first
supervise   the parent: keeps a child at work, survives its crashes, writes gpu.json
work        the child: takes item after item of the plan
prepare     what needs no GPU (compiling, oracles), in parallel processes
numerics    the kernels against float64 oracles; `programs`: random tile programs against the interpreter
speed       the kernels against their peers; `peers`: who these are; `clock`: how they are timed
tune        variants of blocks, warps and stages
report      the tables
"""
