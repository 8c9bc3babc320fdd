"""Memory of other libraries' arrays, read in place."""
