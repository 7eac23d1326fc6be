"""Plan of a Func for a CPU: loop nests, buffers in scratch memory, and the partition into tasks."""
