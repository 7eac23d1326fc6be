"""Plan of a Func for a GPU: order of programs, loop bounds in tiles, copies by the Tensor Memory Accelerator."""
