"""A plugin of pytest: fork the ranks of a test run in a process of its own."""

from tests.support import forked_ranks

forked_ranks.install()
