"""Communicate between ranks: collectives of a group, their routes, and simulated ranks."""
