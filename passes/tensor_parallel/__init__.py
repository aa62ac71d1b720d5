"""Layers of tensor-parallel programs run scattered over their tokens."""
