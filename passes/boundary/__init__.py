"""What a rank's program returns beside its results, for those that stay in shards."""
