"""Comparing while the training runs: which calls, by which judge, in which process, and who is to blame.

It may import `watch`, `judge` and what these import.
"""
