"""Run work on a rank's rows tile by tile: sequence parallelism in time, with the same sharding rules."""
