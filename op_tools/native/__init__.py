"""Code that is compiled: C++ through ctypes, Triton kernels, and what they measure.

It may import `call` and `view`; the sources are in `csrc/`.
"""
