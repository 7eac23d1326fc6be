"""libtpu: programs compiled for TPUs, on machines without any."""
