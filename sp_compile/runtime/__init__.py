"""What ranks agree on: groups and grids, and the checks that all of them run the same."""
