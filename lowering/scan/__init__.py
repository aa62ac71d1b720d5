"""Prefix scans: one table of implementations, and the ``sp::`` operators over it."""
