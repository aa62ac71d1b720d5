"""Recognize scans: cumulative ops, idioms of several ops, trees of combines, and unrolled loops."""
