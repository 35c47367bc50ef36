"""Which dtype a computation runs in: the one question the norms, the attention and the loss all ask."""

import torch
from torch import Tensor


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype matrix products with `tensor` run in: autocast's where autocast is on, else the tensor's own."""
    device_type = tensor.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return tensor.dtype


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype for sums and exponentials: float64 stays float64, everything else becomes float32."""
    return torch.promote_types(dtype, torch.float32)
