"""Sources of cases on real ranks, a kind of program each; a case is a `Scene`, which `on_ranks` plays and judges."""
