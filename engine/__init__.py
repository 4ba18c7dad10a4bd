"""The host loop and what it owns: requests, scheduler, page pool, step functions, executables.

Token ids in, token ids out; knows no text and no gRPC.
"""
