"""Whether a result is right: the golden run, the rounding bound and the verdict.

It may import `files` and what that imports; it knows nothing of how a call was watched.
"""
