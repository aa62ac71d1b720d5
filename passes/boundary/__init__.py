"""Describe the sharded inputs and outputs of a rank's program, and add the outputs that they need."""
