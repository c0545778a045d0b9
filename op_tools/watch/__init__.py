"""How calls are seen: the interceptor, what it patches, the gradients of a call, the backward clock, compiled code.

It may import `files` and what that imports; it knows no tool and no judge.
"""
