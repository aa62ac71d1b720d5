"""Provide attention, scans and exchanges as functions on shards.

They are for models that are already distributed.
"""
