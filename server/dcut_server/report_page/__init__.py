"""`dcut-trt report`: measurements and simulations as one page that needs nothing else."""
