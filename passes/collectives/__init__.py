"""Passes on the exchanges that a program brings: permuted ones, and chains of reductions."""
