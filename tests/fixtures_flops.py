"""torch's FlopCounterMode, extended by the fused attention of the CPU."""

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count


def _forward(query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _backward(gradient: Any, query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> int:
    return sdpa_backward_flop_count(gradient, query, key, value)


FUSED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
}


def counter() -> FlopCounterMode:
    return FlopCounterMode(display=False, custom_mapping=FUSED)
