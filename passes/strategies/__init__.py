"""Passes that claim demands: each meets those that it understands, and `gather` what is left."""
