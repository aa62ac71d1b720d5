"""Reductions over several axes of a mesh become one."""
