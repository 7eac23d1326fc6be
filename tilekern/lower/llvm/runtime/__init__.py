"""The CPU and the process: machine, FFI handler, floating-point mode, huge pages."""
