"""Rewrite the collectives of a program: permutes around all-to-alls, and chains of reductions."""
