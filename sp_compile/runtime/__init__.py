"""Agree on groups and meshes over the ranks, and check that all ranks run the same program."""
