"""Set-up of the unit tests: hypothesis repeats the same examples, and machine load cannot fail one."""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("repeatable")
