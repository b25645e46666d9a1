"""Networks, written once over a small op vocabulary."""
