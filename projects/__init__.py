"""Reference training jobs: real clients of the device layer and of the tools."""
