"""The control channel of a group: small messages on the CPU, and what ranks leave in the store for others."""
