"""Provide errors, ranks, registries, frames and progress lines to all layers."""
