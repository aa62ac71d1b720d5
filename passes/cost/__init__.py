"""What a rewrite is predicted to take: the machine's constants, and the time and bytes of each candidate."""
