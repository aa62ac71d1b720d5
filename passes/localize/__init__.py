"""Global shapes become one rank's, and every one of them is proved."""
