"""Names that the runner of native test files and its pytest plugin share; importing it activates nothing."""

SELECTION = "DITORCH_CONFORMANCE_SELECTION"
"""Variable: file with the tests of this shard, one per line."""
DIARY = "DITORCH_CONFORMANCE_DIARY"
"""Variable: file that the plugin writes to as tests start and end."""
