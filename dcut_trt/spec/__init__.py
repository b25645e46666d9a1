"""The D-cut stages: score, select, pack, accept, and what a step costs."""
