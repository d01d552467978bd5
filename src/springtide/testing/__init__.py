"""Test kits for authors of plug-ins: they check a policy, executor, store, trace reader or collective schedule.

Call a kit's functions from your own tests; they raise AssertionError with a sentence about the first violation.
"""
