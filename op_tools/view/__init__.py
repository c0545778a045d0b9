"""What people see of a run: the console, and the records behind it (sqlite, CSV).

The one room that prints. It may import `call`.
"""
