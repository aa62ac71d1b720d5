"""A permute and an exchange become one `all_to_all_permute`."""
