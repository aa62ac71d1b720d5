"""An unrolled loop over time becomes one scan."""
