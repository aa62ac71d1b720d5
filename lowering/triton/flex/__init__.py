"""Attention whose scores or pairs only a text describes, as one kernel: torch's flex_attention."""
