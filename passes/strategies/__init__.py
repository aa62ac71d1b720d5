"""Discharge demands: each pass claims those that it supports, and `gather` the remaining ones."""
