"""Sharding: placements of values, rules of operators, and the dims that are the sequence."""
