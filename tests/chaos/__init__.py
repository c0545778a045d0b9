"""What the tools go through and leave whole: kills, full disks, hostile files. `make test-chaos` runs it all."""
