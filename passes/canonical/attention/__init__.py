"""Attention in any spelling becomes one node, and its mask a predicate over positions."""
