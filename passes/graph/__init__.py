"""Utilities for FX graphs: call arguments, sizes, edits, strides, mutations and random draws."""
