"""What the tools go through and leave whole: kills, full disks, hostile files. `make test-chaos` runs it all."""

import os

os.environ.setdefault("DITORCH_SOFT_DEVICES", "2")  # before ditorch is imported: one for each rank
