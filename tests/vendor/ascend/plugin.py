"""A pytest plugin that computes on the CPU in the test process and in the processes that tests start."""

from tests.vendor.ascend.cpu_kernels import enter

KERNELS = enter()
