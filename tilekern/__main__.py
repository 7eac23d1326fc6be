"""`python -m tilekern`: see `tilekern.command_line`."""

import sys

from tilekern.command_line import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
