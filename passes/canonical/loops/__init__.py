"""Rewrite unrolled loops over time as scans."""
