"""The configurations that come with the project."""
