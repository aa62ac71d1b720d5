"""Propagate placements through a graph."""
