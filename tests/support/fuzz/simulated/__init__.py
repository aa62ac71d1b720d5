"""Sources of cases on simulated ranks: random programs, heads and MLPs in tiles, and the ops of torch's op_db."""
