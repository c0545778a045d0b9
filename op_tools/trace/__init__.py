"""The graph of a run as a file: recorded, shown, imported, merged, and aligned with another one.

What belongs here knows traces. `tools/trace.py` watches the run and feeds `record.Recorder`.
"""
