"""Which versions of PyTorch and Python work: an environment for each pair, and a quick suite in it."""
