"""Rewrite equivalent forms of a computation to one canonical form."""
