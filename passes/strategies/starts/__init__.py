"""Passes that mark values at which propagation starts shards, before placements are chosen."""
