"""Copies of a call's tensors, the memory that they take, and the bounded queue that they wait in.

It may import `call`, `view` and `native`.
"""
