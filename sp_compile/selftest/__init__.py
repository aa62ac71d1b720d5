"""Compare this machine's ranks with a single device: `python -m sp_compile selftest`."""
