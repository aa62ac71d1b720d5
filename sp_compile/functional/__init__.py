"""Provide attention, scans and exchanges as functions on shards, for models that are already distributed."""
