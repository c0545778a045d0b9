"""Calls on disk: the format of captures, its readers, and the reproducer scripts.

It may import `copies` and what that imports. Nothing in a file is ever executed.
"""
