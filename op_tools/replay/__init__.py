"""Captured calls, run again: looked up, placed on a device, timed, judged and reported.

It may import `judge` and what that imports.
"""
