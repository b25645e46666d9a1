"""What an operator runs a server with: metrics, traces, logs, TLS, tokens and limits."""
