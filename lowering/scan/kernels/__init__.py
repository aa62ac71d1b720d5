"""Scans on one device: the algorithm to read, and those that run."""
