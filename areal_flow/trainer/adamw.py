"""AdamW as torch has it, in a process that compiles nothing.

The methods of torch's optimizers are wrapped for its compiler and import it when they are called,
which takes a second of every trainer's start.
"""

from __future__ import annotations

from inspect import unwrap

import torch
from torch.optim import Adam, Optimizer


class UncompiledAdamW(torch.optim.AdamW):
    """torch's AdamW, its methods unwrapped."""

    step = torch.no_grad()(unwrap(Adam.step))
    zero_grad = unwrap(Optimizer.zero_grad)
    add_param_group = unwrap(Optimizer.add_param_group)
    state_dict = unwrap(Optimizer.state_dict)
    load_state_dict = unwrap(Optimizer.load_state_dict)
