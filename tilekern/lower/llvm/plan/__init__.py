"""Plan of a Func for a CPU: loop nests, buffers in scratch memory, private copies of updated arrays."""
