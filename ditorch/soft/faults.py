def from_environment(): pass
