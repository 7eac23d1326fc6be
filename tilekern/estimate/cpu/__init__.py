"""The rates of this machine's CPU, measured once: `peak`: multiply-adds; `rates`: all of them, and their file."""
