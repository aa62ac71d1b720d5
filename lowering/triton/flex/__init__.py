"""Run attention with textual score and mask functions as one kernel: torch's flex_attention."""
