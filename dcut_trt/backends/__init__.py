"""Runtimes behind one pair of protocols."""
