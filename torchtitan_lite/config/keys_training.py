"""The keys of what is computed: model, data, loss, optimizer, parallelism. See keys.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Dataset = Literal["auto", "text", "jsonl", "hf", "tokens", "synthetic"]
Schedule = Literal[
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
]


@dataclass
class Model:
    """Which model is trained."""

    name: str = "llama3"
    """Model family."""

    flavor: str = "debugmodel"
    """Size within the family."""

    hf_assets_path: str = "./assets/tokenizer"
    """Folder of the tokenizer: it holds tokenizer.json."""

    overrides: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's own configuration that replace the flavor's, by name."""


@dataclass
class DataLoader:
    """Processes that read rows ahead of the training step; they never change the rows."""

    num_workers: int = 0
    """Processes that prepare rows; 0 prepares them in the training process."""

    prefetch_factor: int = 2
    """Batches that each worker keeps ready."""


@dataclass
class Training:
    """What a step consists of, what it reads, and in which precision."""

    seq_len: int = 2048
    """Tokens in a row."""

    local_batch_size: int = 8
    """Rows that a batch rank takes through the model at once."""

    global_batch_size: int = -1
    """Rows in an optimizer step over all ranks; -1: local_batch_size x batch ranks."""

    steps: int = 10000
    """Optimizer steps of the whole run, those before a resume included."""

    max_norm: float = 1.0
    """Gradient norm above which gradients are scaled down to it; 0 clips nothing."""

    norm_type: float = 2.0
    """The p of the gradient norm: 1, 2 or inf."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the stored parameters, gradients and optimizer state."""

    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of the parameters in forward and backward."""

    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """Precision in which gradients are summed over ranks."""

    dataset: Dataset = "auto"
    """Kind of dataset_path: auto looks at it; synthetic needs none."""

    dataset_path: str = ""
    """File or folder with the training data."""

    dataset_text_column: str = "text"
    """Field of a jsonl or hf dataset that holds the text."""

    token_cache: str = "./outputs/token_cache"
    """Folder that keeps tokenised text, found again by the hash of its content."""

    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory between uses."""

    gc_freq: int = 50
    """Steps from one Python garbage collection to the next; in between there is none."""

    max_skipped_steps: int = 10
    """Steps in a row with a non-finite gradient, all skipped, that stop the run."""

    dataloader: DataLoader = field(default_factory=DataLoader)
    """Processes that read ahead."""


@dataclass
class Loss:
    """How the loss is computed."""

    num_chunks: int = 8
    """Pieces of a micro-batch whose logits exist one after the other."""

    z_loss_weight: float = 0.0
    """Weight of the squared log-partition beside the cross-entropy; 0 leaves it out."""


@dataclass
class Optimizer:
    """Which optimizer steps, and how strongly on which parameters."""

    name: Literal["AdamW", "SGD"] = "AdamW"
    """Optimizer."""

    lr: float = 8e-4
    """Learning rate at its highest, before the multipliers of lr_multipliers."""

    beta1: float = 0.9
    """Decay of AdamW's mean of gradients."""

    beta2: float = 0.95
    """Decay of AdamW's mean of squared gradients."""

    eps: float = 1e-8
    """What AdamW adds to the root of the mean of squares."""

    weight_decay: float = 0.1
    """Decay of the parameters that no pattern of no_decay matches."""

    momentum: float = 0.0
    """Momentum of SGD."""

    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """Kernel of the step: one for all parameters, lists of parameters, or one by one."""

    no_decay: list[str] = field(
        default_factory=lambda: [
            "*norm.weight",
            "*layernorm.weight",
            "*.bias",
            "embed_tokens.weight",
        ]
    )
    """Patterns (as of file names) of parameter names without weight decay."""

    lr_multipliers: dict[str, float] = field(default_factory=dict)
    """Factor on the learning rate by pattern of parameter names."""


@dataclass
class LRScheduler:
    """The learning rate as a function of the step: warm-up, constant, decay."""

    warmup_steps: int = 200
    """Steps of the linear rise from lr / warmup_steps to lr."""

    total_steps: int | None = None
    """Step at which the schedule ends; none: training.steps."""

    decay_ratio: float | None = None
    """Share of the schedule that decays, the last one; none: all after the warm-up."""

    decay_type: Literal["constant", "linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay; constant does not decay."""

    min_lr_factor: float = 0.0
    """Share of lr at which the decay ends."""


@dataclass
class Parallelism:
    """How the world of ranks is cut: pp x dp_replicate x dp_shard x cp x tp."""

    pipeline_parallel_degree: int = 1
    """Ranks that share the layers one after the other."""

    pipeline_parallel_schedule: Schedule = "1F1B"
    """Order in which pipeline ranks run their micro-batches."""

    pipeline_parallel_microbatch_size: int = 1
    """Rows in a micro-batch of the pipeline."""

    pipeline_parallel_layers_per_stage: int | None = None
    """Layers in a stage; none: one stage a rank, two for schedules that interleave."""

    module_fqns_per_model_part: list[list[str]] | None = None
    """Names of the modules of each stage, for a cut by hand."""

    data_parallel_replicate_degree: int = 1
    """Copies of the sharded model that each take their own rows."""

    data_parallel_shard_degree: int = -1
    """Ranks that each take their own rows and share one copy; -1: the rest of the world."""

    zero_stage: int = 3
    """What the shard ranks share: 3 parameters, 2 gradients, 1 optimizer state, 0 nothing."""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Other name of zero_stage: always is 3, never is 2, default leaves it."""

    context_parallel_degree: int = 1
    """Ranks that share a row's tokens."""

    tensor_parallel_degree: int = 1
    """Ranks that share each matrix."""

    enable_sequence_parallel: bool = True
    """Between the matrices, let the tensor-parallel ranks share the tokens of a row."""

    disable_loss_parallel: bool = False
    """Gather the logits of all vocabulary shards before the loss."""

    @property
    def batch_ranks(self) -> int:
        """Number of ranks that read rows of their own: dp_replicate x dp_shard, resolved."""
        assert self.data_parallel_shard_degree >= 1, "resolve the configuration first"
        return self.data_parallel_replicate_degree * self.data_parallel_shard_degree


@dataclass
class ActivationCheckpoint:
    """What backward computes again instead of having kept it."""

    mode: Literal["none", "full", "selective"] = "selective"
    """Nothing, every layer, or what selective_ac_option says."""

    selective_ac_option: str = "2"
    """Every n-th layer ("2"), or in each layer what costs little to compute again ("op")."""


@dataclass
class Validation:
    """The loss on rows that are not trained on."""

    enable: bool = False
    """Compute it."""

    dataset: Dataset = "auto"
    """Kind of dataset_path, as of training.dataset."""

    dataset_path: str = ""
    """File or folder with the held-out data."""

    freq: int = 10
    """Steps from one validation to the next."""

    steps: int = -1
    """Batches of a validation; -1: all rows."""

    local_batch_size: int = 8
    """Rows that a batch rank takes through the model at once."""

    seq_len: int = -1
    """Tokens in a row; -1: training.seq_len."""
