"""What ditorch and op_tools share; it imports neither."""
