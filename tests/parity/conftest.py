"""Set-up of the parity tests."""

import torch

torch.set_num_threads(1)  # the references are tiny; torch's threads would only spin beside the runtime's own
