"""Prebuilt kernels, a folder each: public function, reference, kernel, schedules, and named real-world cases."""
