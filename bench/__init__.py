"""The load generator and comparisons with peers.

Drives a server over gRPC; of the server's code it takes the protocol and the command-line helpers.
"""
