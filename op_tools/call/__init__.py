"""What a call is: its description, its traits, what is known of its operator, where it was made and on which device.

It imports PyTorch, `op_tools.compat` and `op_tools.settings` alone.
"""
