"""Correctness and speed of the kernels on an NVIDIA GPU: `python -m bench.gpu --out FOLDER`.

plan        the items of a run, most important first; `item`: their base class
supervise   the parent process: starts children, survives their crashes, writes gpu.json; `journal`: their records
work        the child process: runs the items of the plan one after the other
prepare     work without a GPU (compilation, oracles), in parallel processes
numerics    kernels against float64 oracles; `kernels`, `trained`, `warp_specialised`: the kernels and their cases;
            `gradients`: gradients of any function, and of attention with each feature
programs    random tile programs against the interpreter
speed       the kernels against their peers; `training`: kernels of training; `peers`, `torch_peers`, `bench.formulas`:
            other implementations; `clock`: timing
tune        variants of blocks, warps and stages
report      the tables
dry         without a GPU: compiles all programs and prints their resources; `launch`: and launches all items on a
            pretended GPU, which `pretended` holds
"""
