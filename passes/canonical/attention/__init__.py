"""Rewrite every form of attention as one node, with its mask as a predicate over positions."""
