"""The load generator and comparisons with peers.

Drives a server over gRPC; imports engine and server only through their public records.
"""
