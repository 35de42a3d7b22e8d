"""Even load of the experts, from one sum a step.

    micro-batches    each router counts the tokens it sends to each expert, and sums its losses
    after the step   one all-reduce over the world of all layers' counts and losses
    from the counts  bias of a router up where the load was below the mean, else down
                     shares of the global batch, which the auxiliary loss of that form weighs with
                     what the metrics tell

Every token is routed on one rank, and counted once: not in validation, and not where a layer is
computed again for its backward. All ranks know the counts of all layers, and move alike.

Proven in tests/optim/test_balance.py and tests/parity/test_experts.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_lite.config import Config
from torchtitan_lite.models.config import ModelConfig
from torchtitan_lite.models.decoder import Decoder
from torchtitan_lite.models.moe import Balance, MoE, Router


def routers_of(parts: Iterable[Decoder]) -> dict[int, Router]:
    """The routers of this rank's parts, by the index of their layer in the whole model."""
    layers = [item for part in parts for item in part.layers.items()]
    moe = [(int(i), getattr(layer, "mlp", None)) for i, layer in layers]
    return {i: mlp.gate for i, mlp in moe if isinstance(mlp, MoE)}


class ExpertBalance:
    """Keeps the routers of a model even, step by step.

    `shares` (layers, experts) are those of the last global batch; a resumed run needs them.
    """

    def __init__(
        self,
        parts: Iterable[Decoder],
        model: ModelConfig,
        config: Config,
        device: torch.device,
    ) -> None:
        self.routers = routers_of(parts)
        self.model = model
        self.speed = config.moe.bias_update_speed
        weights = Balance(
            auxiliary_weight=config.moe.aux_loss_weight,
            per_sequence=config.moe.aux_loss_form == "sequence",
            z_weight=config.moe.z_loss_weight,
            num_sequences=config.training.global_batch_size,
            seq_len=config.training.seq_len,
        )
        shape = model.num_hidden_layers, model.num_experts
        self.shares = torch.full(shape, 1 / model.num_experts, device=device)
        self.totals = torch.zeros(model.num_hidden_layers, model.num_experts + 2)
        self.num_pairs = weights.num_sequences * weights.seq_len * model.num_experts_per_tok
        for index, router in self.routers.items():
            router.balance = weights
            router.load = self.shares[index]

    def begin(self) -> None:
        """Before the first micro-batch of a global batch."""
        for router in self.routers.values():
            router.counts.zero_()
            router.losses.zero_()
            router.is_counting = True

    def end(self, *, applied: bool) -> None:
        """After the optimizer step, which was `applied` or skipped; a collective of the world."""
        totals = torch.zeros(self.totals.shape, dtype=torch.float64, device=self.shares.device)
        for index, router in self.routers.items():
            router.is_counting = False
            totals[index] = torch.cat((router.counts.double(), router.losses.double()))
        dist.all_reduce(totals)
        self.totals = totals
        if not applied:
            return
        counts = totals[:, :-2]
        mean = counts.mean(dim=1, keepdim=True)
        shares = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
        self.shares.copy_(torch.where(mean > 0, shares, self.shares))
        for index, router in self.routers.items():
            if router.e_score_correction_bias is not None:
                direction = torch.sign(mean[index] - counts[index])
                router.e_score_correction_bias += self.speed * direction

    def report(self) -> dict[str, Any]:
        """What the metrics tell of the last step.

        expert_tokens: a list for each layer with experts, by its index; expert_load_max: the
        largest load of an expert over the mean of its layer; expert_dropped: share of the pairs
        (token, choice) that reached no expert; and both losses, summed over the layers. Nothing
        where all layers are dense.
        """
        counts = self.totals[:, :-2]
        layers = [i for i in range(len(counts)) if self.model.has_experts(i)]
        if not layers:
            return {}
        load = counts[layers].amax(dim=1) / counts[layers].mean(dim=1).clamp(min=1e-9)
        auxiliary, z = self.totals[:, -2:].sum(dim=0).tolist()
        return {
            "expert_tokens": {str(i): [int(n) for n in counts[i].tolist()] for i in layers},
            "expert_load_max": load.max().item(),
            "expert_dropped": 1 - counts.sum().item() / (self.num_pairs * len(layers)),
            "moe_aux_loss": auxiliary,
            "moe_z_loss": z,
        }
