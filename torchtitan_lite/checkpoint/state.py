"""What a checkpoint holds: a flat dictionary from names to tensors.

    embed_tokens.weight                               weights: Hugging Face names, no prefix
    optimizer.state.embed_tokens.weight.exp_avg       whatever the optimizer holds for a weight
    optimizer.state.embed_tokens.weight.step
    trainer.step                                      training scalars, as 0-d tensors
    trainer.expert_shares                             load of the experts in the last step
    trainer.amax_history.<fqn>                        largest numbers of a float8 linear, delayed
    dataloader.consumed_samples

No rank, stage, group or parameter order is in a name, so a rank of any mesh asks for the names it
holds, and DCP cuts the tensors as its DTensors say. Learning rates and other hyper-parameters are
not state: they come from the configuration, and a saved copy could only disagree with it.

A tied head on the last pipeline stage goes by the name of the embedding. Both stages offer the
same shards, DCP writes each once, and a load fills both.

The tensors are the live ones: DCP copies into them. Only an optimizer that has not stepped yet has
none; `materialise_state` gives it some. Proven in tests/checkpoint/test_state.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

State = dict[str, Tensor]

# What a run can do without: the first step then takes its scales from its own numbers.
BEGINS_ANEW = "trainer.amax_history."
# Names that checkpoint.exclude_from_loading knows, and how the keys of each part begin; "model" is
# what is left.
PART_PREFIXES = {"optimizer": "optimizer.", "train_state": "trainer.", "dataloader": "dataloader."}

# A step with zero gradients under these leaves each weight as it is, bit by bit: eps must not be 0,
# or 0 / (sqrt(0) + eps) is NaN.
_HARMLESS = {"lr": 0.0, "weight_decay": 0.0, "eps": 1.0}


def part_of(key: str) -> str:
    """The part that `key` belongs to: model, optimizer, train_state or dataloader."""
    parts = (part for part, prefix in PART_PREFIXES.items() if key.startswith(prefix))
    return next(parts, "model")


def model_state(named_parameters: Mapping[str, Tensor]) -> State:
    """This rank's weights (and buffers, if given) by canonical name, sharing their memory."""
    reserved = [name for name in named_parameters if part_of(name) != "model"]
    assert not reserved, f"names of other parts of a checkpoint: {reserved}"
    return {name: parameter.detach() for name, parameter in named_parameters.items()}


def optimizer_state(optimizer: Optimizer, named_parameters: Mapping[str, nn.Parameter]) -> State:
    """The optimizer's state as `optimizer.state.<fqn>.<name>`, sharing the memory of its tensors.

    All of it is tensors, the count of steps too, so that a load fills it in place.
    """
    state: State = {}
    fqn_of: dict[Tensor, str] = {parameter: fqn for fqn, parameter in named_parameters.items()}
    for parameter, of_parameter in optimizer.state.items():
        assert parameter in fqn_of, "the optimizer holds a parameter that has no name"
        for name, value in of_parameter.items():
            if value is None:  # SGD without momentum
                continue
            assert isinstance(value, Tensor), f"{name} of {fqn_of[parameter]} is no tensor: {value}"
            if isinstance(value, DTensor):
                # Each rank's summand would be saved as if it were the sum.
                partial = any(placement.is_partial() for placement in value.placements)
                assert not partial, f"{name} of {fqn_of[parameter]} is an unreduced sum"
            state[f"optimizer.state.{fqn_of[parameter]}.{name}"] = value
    return state


def materialise_state(optimizer: Optimizer) -> None:
    """Give an optimizer that has not stepped the state of step 0, for a load to fill.

    Works for any torch optimizer: it makes one step with zero gradients, a learning rate and a
    decay of 0. Weights stay bitwise as they are, gradients end as None, hyper-parameters as they
    were. Parameters that have state keep it; frozen ones get none.
    """
    groups = optimizer.param_groups
    kept = [dict(group) for group in groups]
    parameters = [parameter for group in groups for parameter in group["params"]]
    unborn = [p for p in parameters if p.requires_grad and not optimizer.state.get(p)]
    optimizer.zero_grad()  # to None: whoever has state, or is frozen, takes no part in the step
    for parameter in unborn:
        parameter.grad = torch.zeros_like(parameter)
    for group in groups:
        group.update({name: value for name, value in _HARMLESS.items() if name in group})
    optimizer.step()
    optimizer.zero_grad()
    for group, values in zip(groups, kept, strict=True):
        group.update(values)
    for parameter in unborn:
        # Zero gradients leave moments as they were born; only the count has moved.
        of_parameter = optimizer.state[parameter]
        if "step" in of_parameter:
            of_parameter["step"] = of_parameter["step"] * 0


def train_state(values: Mapping[str, int | float], *, part: str = "train_state") -> State:
    """Training scalars as 0-d tensors (int64, float64), for a save, or for a load to fill.

    `part` is "train_state" (keys `trainer.<name>`) or "dataloader" (keys `dataloader.<name>`).
    """
    # Double holds each Python float exactly; an int becomes int64.
    kinds = {int: torch.int64, float: torch.float64}
    return {
        f"{PART_PREFIXES[part]}{name}": torch.tensor(value, dtype=kinds[type(value)])
        for name, value in values.items()
    }


def read_train_state(
    state: Mapping[str, Tensor], *, part: str = "train_state"
) -> dict[str, int | float]:
    """The scalars that `train_state` made, by name."""
    prefix = PART_PREFIXES[part]
    return {
        key.removeprefix(prefix): tensor.item()
        for key, tensor in state.items()
        if key.startswith(prefix) and tensor.dim() == 0
    }


def cast_state(
    state: Mapping[str, Tensor], dtype: torch.dtype, *, exact: Collection[str] = ()
) -> State:
    """`state` with its floating-point tensors, but those named `exact`, in `dtype`.

    Copies where they differ.
    """
    return {
        key: tensor.to(dtype) if tensor.is_floating_point() and key not in exact else tensor
        for key, tensor in state.items()
    }
