"""Spellings of one idea become one: what recognisers read and what they write in its place."""
