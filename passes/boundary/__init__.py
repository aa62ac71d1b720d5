"""Add the outputs of a rank's program that its sharded outputs need."""
