"""Scatter the layers of tensor-parallel programs over their tokens."""
