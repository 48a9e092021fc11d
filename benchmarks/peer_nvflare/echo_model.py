"""The model of the echo work: float32 parameters in tensors of 4 MiB."""

import torch

PART_VALUES = 1 << 20


class Parts(torch.nn.Module):
    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        num_values = num_bytes // 4
        sizes = [PART_VALUES] * (num_values // PART_VALUES) + [num_values % PART_VALUES]
        self.parts = torch.nn.ParameterList([torch.zeros(size) for size in sizes if size])
