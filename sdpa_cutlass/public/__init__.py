"""Signatures and meanings: the functions that users call."""
