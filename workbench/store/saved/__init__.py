"""Saved sessions as files: what is in one, what is kept out of one, and how one is read that nobody trusts."""
