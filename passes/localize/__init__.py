"""Rewrite global shapes to the shapes of one rank, and validate them."""
