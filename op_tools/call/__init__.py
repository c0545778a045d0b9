"""What a call is: its description, its traits, what is known of its operator, where it was made and on which device.

The lowest room. It imports PyTorch and `op_tools.settings` alone.
"""
