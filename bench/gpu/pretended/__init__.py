"""A pretended GPU: a CUDA driver in C that checks and records what is asked of it. No kernel runs.

| file | holds |
|---|---|
| `image.c` | what a cubin says about its entry functions: architecture, parameters, threads, shared memory |
| `launch.c` | modules, functions, TMA descriptors, launches: the driver's checks, and a record of each call |
| `device.c`, `memory.c`, `stream.c` | the GPU and its contexts, memory, streams |
| `record.c` | the record: lines of JSON in the file `PRETENDED_RECORD` |
| `build.py` | compiles them to `libcuda.so.1`, with the system's C compiler and the headers in Triton's wheel |

`PRETENDED_CAPABILITY` is the compute capability of the GPU, 90 by default.
"""
