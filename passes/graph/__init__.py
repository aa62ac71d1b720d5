"""What every room needs of an FX graph: a node's arguments and sizes, edits, strides, writes, draws."""
