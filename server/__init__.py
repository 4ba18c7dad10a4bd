"""Bytes and text at the edge: the gRPC service and the command line."""
