"""Fuse permutes and all-to-alls into `all_to_all_permute`."""
