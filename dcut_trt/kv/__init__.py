"""Who owns which KV rows."""
