"""The gRPC server, its client and the command line."""
