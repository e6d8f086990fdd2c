"""What outlives the driver of a run on Ray, so that the run goes on with it.

claim.py, to open first, has the records: a driver's claim, what a process says of itself, and the file by which both
find each other. head.py holds a Ray cluster that no driver owns. takeover.py takes living processes over.
"""
