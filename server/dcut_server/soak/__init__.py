"""A long mixed load on a real server, with leak checks whenever it is idle."""
