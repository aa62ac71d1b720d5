"""Rewrite the collectives of a program: permutes around all-to-alls, and chains of reductions.

These are the collectives that the user's program calls, not those that strategies insert. A file of this
folder or a subfolder registers a `CollectivePass`; new files are discovered automatically.
"""
