"""Peers that are programs of their own, and so cannot take turns with others in one process."""
