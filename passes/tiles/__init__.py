"""Work on a rank's rows is done tile by tile: sequence parallelism in time, by the rules of sequence parallelism."""
