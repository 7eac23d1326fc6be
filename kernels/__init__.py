"""The prebuilt kernels: a folder for each."""

import os

from tilekern import source

source.register_kernels(os.path.dirname(__file__))
