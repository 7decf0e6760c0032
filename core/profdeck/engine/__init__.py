"""What runs inside an engine's processes, the same for every engine: requests, recording, the device's backend.

An engine's plugin brings a request to each process and reports its iterations; all else is done here.
"""
