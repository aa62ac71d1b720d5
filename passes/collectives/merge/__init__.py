"""Merge reductions over several axes of a mesh."""
