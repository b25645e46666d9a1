"""The selector as one GPU kernel: rank all drafts, choose the budget, pack what is kept."""
