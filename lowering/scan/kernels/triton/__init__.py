"""Scans on a GPU."""
