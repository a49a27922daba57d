"""One stream's part of a phase: a generate or an edit, from a state to a new state or an error.

A pass never changes what it was given: it returns an outcome, and whoever ran it commits the
outcome's change or drops it. So a failed pass leaves its stream as it was, and a parent process
can apply the same change to its copy.
"""
