"""What the attention functions for Transformers share: which calls the certificate covers."""

from __future__ import annotations

from typing import Any, Optional

import numpy as np
import torch

from certkv._engine import unsupported
from certkv._spec import CacheSpec

# Arguments of an attention function that change its result, and the values that don't.
_PLAIN = {
    "dropout": (0.0,),
    "position_bias": (None,),
    "softcap": (None,),
    "s_aux": (None,),
    "cache": (None,),
    "output_attentions": (None, False),
    "is_causal": (None, True),
}


def check_call(
    spec: CacheSpec, module: torch.nn.Module, scaling: Optional[float], others: dict[str, Any]
) -> None:
    """Is this call softmax(scale * q.k) v of the layer that the spec describes?

    Raises:
        InvalidArgumentError: [ENGINE_UNSUPPORTED], naming the argument.
    """
    for name, plain in _PLAIN.items():
        if name in others and not any(others[name] is p or others[name] == p for p in plain):
            raise unsupported(f"the attention's {name} is {others[name]}, must be {plain[0]}")
    layer = module.layer_idx
    window = spec.layers[layer].sliding_window
    if (others.get("sliding_window") or 0) != window:
        raise unsupported(
            f"layer {layer} has a window of {others.get('sliding_window') or 0} tokens, the "
            f"config said {window}"
        )
    if scaling is None or not np.isclose(scaling, spec.logit_scale, rtol=1e-6):
        raise unsupported(f"the attention's scale is {scaling}, not {spec.logit_scale}")


def token_major(tensor: torch.Tensor) -> torch.Tensor:
    """[heads, tokens, channels] -> [tokens, heads, channels] on the CPU."""
    return tensor.detach().transpose(0, 1).contiguous().cpu()
