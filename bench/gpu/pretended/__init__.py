"""A pretended GPU: a CUDA driver in C that checks and records each call. No kernel runs.

| file | holds |
|---|---|
| `driver/image.c` | facts of a cubin's entry functions: architecture, parameters, threads, shared memory |
| `driver/launch.c` | modules, functions, TMA descriptors, launches: the driver's checks, and a record of each call |
| `driver/device.c`, `memory.c`, `stream.c` | the GPU and its context, memory, streams, events and graphs |
| `driver/runtime.c` | the functions of the CUDA runtime, which is linked into JAX's plugin |
| `driver/record.c` | the record: lines of JSON in the file `PRETENDED_RECORD` |
| `management/` | NVML, NVIDIA's library to manage GPUs |
| `build.py` | compiles the driver and NVML, with the system's C compiler and the headers in Triton's wheel |
| `install.py` | makes JAX of this process see the GPU |

`PRETENDED_CAPABILITY` is the compute capability of the GPU, 90 by default.
"""
