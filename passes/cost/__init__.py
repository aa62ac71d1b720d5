"""Cost model: constants of the machine, and predicted time and bytes of each candidate of a rewrite."""
