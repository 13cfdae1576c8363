"""Mutants of the pure core: small mistakes, each of which some test should find.

`python -m tests.mutants --help` says how to run them. `mutmut` makes the mistakes. What survives
is read: it gets a test, or a line in ``equal.diff`` that says why it changes nothing.
"""
