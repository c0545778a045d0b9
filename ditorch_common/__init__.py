"""What ditorch and op_tools share: patches, settings, the compiler; imports neither."""
