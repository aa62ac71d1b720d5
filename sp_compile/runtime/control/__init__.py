"""Exchange small CPU messages between the ranks of a group, and publish failures in its store."""
