"""How calls are seen: the interceptor, what it patches, the gradients of a call, and the clock of the backward pass.

It may import `files` and what that imports; it knows no tool and no judge.
"""
