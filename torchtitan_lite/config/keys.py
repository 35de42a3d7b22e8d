"""Every key there is: a section is a dataclass, a key is a field, the string below it is its help.

Nothing else declares a key. The loader (load.py) takes names, types, bounds and defaults from here,
`--help` (schema.py) reads the strings from this file, and the saved TOML walks the fields. To add a
key, add its field and its sentence here and, if it acts only together with another, a row in
effects.py; tests/config/test_keys.py asks for the rest.

    --training.seq_len 512          Config().training.seq_len
    [training]                      the same, in TOML
    seq_len = 512
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple


class ConfigError(ValueError):
    """A mistake of the user's, told one a line: key, value, reason, fix. Ends train.py with 2."""


class Bound(NamedTuple):
    """What a type does not say of a value, and the words for it."""

    holds: Callable[[Any], object]
    sentence: str


Text = Annotated[str, Bound(lambda text: text != "", "not empty")]
Count = Annotated[int, Bound(lambda n: n >= 1, "at least 1")]
CountOrAuto = Annotated[int, Bound(lambda n: n >= 1 or n == -1, "at least 1, or -1")]
CountOrZero = Annotated[int, Bound(lambda n: n >= 0, "0 or more")]
Step = Annotated[int, Bound(lambda n: n >= -1, "0 or more, or -1")]
# The newest may turn out to be damaged.
Kept = Annotated[int, Bound(lambda n: n == 0 or n >= 2, "0 (keep all) or at least 2")]
ZeroStage = Annotated[int, Bound(lambda n: 0 <= n <= 3, "0, 1, 2 or 3")]
# A generator takes 64 bits, a TOML integer 63 and a sign.
Seed = Annotated[int, Bound(lambda n: 0 <= n < 2**63, "from 0 to 2**63 - 1")]
NotNegative = Annotated[float, Bound(lambda x: 0 <= x < math.inf, "a finite number, 0 or more")]
Positive = Annotated[float, Bound(lambda x: 0 < x < math.inf, "a finite number above 0")]
Share = Annotated[float, Bound(lambda x: 0 <= x <= 1, "from 0 to 1")]
BelowOne = Annotated[float, Bound(lambda x: 0 <= x < 1, "0 or more and below 1")]
NormType = Annotated[float, Bound(lambda p: p in (1, 2, math.inf), "1, 2 or inf")]
EveryNth = Annotated[str, Bound(re.compile("op|[1-9][0-9]*").fullmatch, '"op" or at least 1')]

CheckpointPart = Literal["model", "optimizer", "dataloader", "train_state"]
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
NO_DECAY = ("*norm.weight", "*layernorm.weight", "*.bias", "embed_*.weight", "*.A_log", "*.D")


@dataclass
class Job:
    """Where a run comes from and where its files go."""

    config_file: str = ""
    """TOML file whose values replace the defaults; the command line replaces both."""
    dump_folder: Text = "./outputs"
    """Folder that receives every file of the run."""
    description: str = ""
    """One line about the run, for its log."""
    print_config: bool = False
    """Write the resolved configuration to the log as JSON."""
    save_config_file: str = "config.toml"
    """File under dump_folder that receives the resolved configuration; "" writes none."""


@dataclass
class Model:
    """Which model is trained."""

    name: Text = "llama3"
    """Model family; auto: what the config.json in hf_assets_path says, and its size."""
    flavor: Text = "debugmodel"
    """Size within the family."""
    hf_assets_path: str = "./assets/tokenizer"
    """Folder with tokenizer.json, and with config.json for name = auto."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Fields of the model's own configuration that replace the flavor's, by name."""


@dataclass
class DataLoader:
    """Processes that read rows ahead of the training step; they never change the rows."""

    num_workers: CountOrZero = 0
    """Processes that prepare rows; 0 prepares them in the training process."""
    prefetch_factor: Count = 2
    """Batches that each worker keeps ready."""


@dataclass
class Training:
    """What a step consists of, what it reads, and in which precision."""

    seq_len: Count = 2048
    """Tokens in a row."""
    local_batch_size: CountOrAuto = 8
    """Rows that a batch rank takes through the model at once; -1: its share of the global batch."""
    global_batch_size: CountOrAuto = -1
    """Rows in an optimizer step over all ranks; -1: local_batch_size x batch ranks."""
    steps: Count = 10000
    """Optimizer steps of the whole run, those before a resume included."""
    max_norm: NotNegative = 1.0
    """Gradient norm above which gradients are scaled down to it; 0 clips nothing."""
    norm_type: NormType = 2.0
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
    gc_freq: Count = 50
    """Steps from one Python garbage collection to the next; in between there is none."""
    max_skipped_steps: Count = 10
    """Steps in a row with a non-finite gradient, all skipped, that stop the run."""
    dataloader: DataLoader = field(default_factory=DataLoader)
    """Processes that read ahead."""


@dataclass
class Loss:
    """How the loss is computed."""

    num_chunks: Count = 8
    """Pieces of a micro-batch whose logits exist one after the other."""
    z_loss_weight: NotNegative = 0.0
    """Weight of the squared log-partition beside the cross-entropy; 0 leaves it out."""


@dataclass
class MoE:
    """What keeps the experts of a mixture evenly loaded, and how they are computed."""

    aux_loss_weight: NotNegative = 0.0
    """Weight of the auxiliary loss on uneven load; 0 leaves it out."""
    aux_loss_form: Literal["sequence", "global"] = "sequence"
    """Load of each sequence, or of the last global batch."""
    z_loss_weight: NotNegative = 0.0
    """Weight of the squared log-partition of the router's logits; 0 leaves it out."""
    bias_update_speed: NotNegative = 1e-3
    """Step of the bias of a router that has one, up or down, after each optimizer step."""
    kernel: Literal["auto", "grouped", "loop"] = "auto"
    """One kernel for all experts, or a product for each; auto: the first where there is one."""


@dataclass
class Optimizer:
    """Which optimizer steps, and how strongly on which parameters."""

    name: Literal["AdamW", "SGD"] = "AdamW"
    """Optimizer."""
    lr: Positive = 8e-4
    """Learning rate at its highest, before the multipliers of lr_multipliers."""
    beta1: BelowOne = 0.9
    """Decay of AdamW's mean of gradients."""
    beta2: BelowOne = 0.95
    """Decay of AdamW's mean of squared gradients."""
    eps: Positive = 1e-8
    """What AdamW adds to the root of the mean of squares."""
    weight_decay: NotNegative = 0.1
    """Decay of the parameters that no pattern of no_decay matches."""
    momentum: BelowOne = 0.0
    """Momentum of SGD."""
    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """Kernel of the step: one for all parameters, lists of parameters, or one by one."""
    no_decay: list[str] = field(default_factory=lambda: list(NO_DECAY))
    """Patterns (as of file names) of parameter names without weight decay."""
    lr_multipliers: dict[str, NotNegative] = field(default_factory=dict)
    """Factor on the learning rate by pattern of parameter names."""


@dataclass
class LRScheduler:
    """The learning rate as a function of the step: warm-up, constant, decay."""

    warmup_steps: CountOrZero = 200
    """Steps of the linear rise from lr / warmup_steps to lr."""
    total_steps: Count | None = None
    """Step at which the schedule ends; none: training.steps."""
    decay_ratio: Share | None = None
    """Share of the schedule that decays, the last one; none: all after the warm-up."""
    decay_type: Literal["constant", "linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay; constant does not decay."""
    min_lr_factor: Share = 0.0
    """Share of lr at which the decay ends."""


@dataclass
class Parallelism:
    """How the world of ranks is cut: pp x dp_replicate x dp_shard x cp x tp."""

    pipeline_parallel_degree: Count = 1
    """Ranks that share the layers one after the other."""
    pipeline_parallel_schedule: Schedule = "1F1B"
    """Order in which pipeline ranks run their micro-batches."""
    pipeline_parallel_microbatch_size: Count = 1
    """Rows in a micro-batch of the pipeline."""
    pipeline_parallel_layers_per_stage: Count | None = None
    """Layers in a stage; none: one stage a rank, two for schedules that interleave."""
    module_fqns_per_model_part: list[list[str]] | None = None
    """Names of the modules of each stage, for a cut by hand."""
    data_parallel_replicate_degree: Count = 1
    """Copies of the sharded model that each take their own rows."""
    data_parallel_shard_degree: CountOrAuto = -1
    """Ranks that each take their own rows and share one copy; -1: the rest of the world."""
    zero_stage: ZeroStage = 3
    """What the shard ranks share: 3 parameters, 2 gradients, 1 optimizer state, 0 nothing.
    Left alone it is 3; under a pipeline 2, since 3 gathers the parameters anew for every
    micro-batch."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Other name of zero_stage: always is 3, never is 2, default leaves it."""
    context_parallel_degree: Count = 1
    """Ranks that share a row's tokens."""
    tensor_parallel_degree: Count = 1
    """Ranks that share each matrix."""
    enable_sequence_parallel: bool = True
    """Between the matrices, let the tensor-parallel ranks share the tokens of a row."""
    disable_loss_parallel: bool = False
    """Gather the logits of all vocabulary shards before the loss."""
    expert_parallel_degree: Count = 1
    """Ranks of dp_shard x cp x tp that share the experts of a layer."""

    @property
    def batch_ranks(self) -> int:
        """Number of ranks that read rows of their own: dp_replicate x dp_shard, resolved."""
        assert self.data_parallel_shard_degree >= 1, "resolve the configuration first"
        return self.data_parallel_replicate_degree * self.data_parallel_shard_degree


@dataclass
class Checkpoint:
    """What is saved, when, and what a run starts from."""

    enable: bool = False
    """Save, and resume from the newest valid step in folder."""
    folder: Text = "checkpoint"
    """Folder under dump_folder with one folder a saved step."""
    interval: Count = 500
    """Steps from one save to the next; the last step is always saved."""
    load_step: Step = -1
    """Step to resume from; -1: the newest valid one."""
    keep_latest_k: Kept = 10
    """Newest checkpoints that stay; 0 keeps all, 1 is refused."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Write while training goes on: from a copy, or from a copy in pinned memory."""
    initial_load_path: str = ""
    """Step folder that a run starts from while its own folder holds no checkpoint."""
    initial_load_model_only: bool = True
    """Of initial_load_path take the weights alone."""
    initial_load_in_hf: bool = False
    """Read initial_load_path as a Hugging Face folder: config.json and safetensors."""
    last_save_model_only: bool = False
    """Save the last step as weights alone; by default it is whole, so that it can be extended."""
    last_save_in_hf: bool = False
    """After the last step write the Hugging Face folder step-N-hf too."""
    export_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the weights that last_save_model_only and last_save_in_hf save."""
    exclude_from_loading: list[CheckpointPart] = field(default_factory=list)
    """Parts that a load leaves as they are."""


@dataclass
class ActivationCheckpoint:
    """What backward computes again instead of having kept it."""

    mode: Literal["none", "full", "selective"] = "selective"
    """Nothing, every layer, or what selective_ac_option says."""
    selective_ac_option: EveryNth = "2"
    """Every n-th layer ("2"), or in each layer what costs little to compute again ("op")."""


@dataclass
class Metrics:
    """What is shown and where."""

    log_freq: Count = 10
    """Steps from one logged step to the next; the first is always logged."""
    enable_tensorboard: bool = False
    """Write TensorBoard events too."""
    save_tb_folder: str = "tb"
    """Folder under dump_folder for them."""
    enable_wandb: bool = False
    """Log to Weights & Biases too, set up by its own environment variables."""
    disable_color_printing: bool = False
    """No colours in the log; a log that is not a terminal never has them."""


@dataclass
class Profiling:
    """Traces of time and memory."""

    enable_profiling: bool = False
    """Write a trace of each rank every profile_freq steps."""
    save_traces_folder: str = "profile_traces"
    """Folder under dump_folder for traces."""
    profile_freq: Count = 10
    """Steps from one trace, or memory snapshot, to the next."""
    profiler_active: Count = 1
    """Steps in a trace."""
    profiler_warmup: CountOrZero = 3
    """Steps before them that the profiler watches without keeping."""
    enable_memory_snapshot: bool = False
    """Write the allocator's history every profile_freq steps and when memory runs out."""
    save_memory_snapshot_folder: str = "memory_snapshot"
    """Folder under dump_folder for snapshots."""


@dataclass
class Comm:
    """How long a collective may wait for its slowest rank."""

    init_timeout_seconds: Count = 300
    """Limit up to the first step."""
    train_timeout_seconds: Count = 100
    """Limit after the first step."""


@dataclass
class Debug:
    """What makes runs comparable."""

    seed: Seed = 42
    """Seed of the weights and of the order of the data."""
    deterministic: bool = False
    """Let operators take only deterministic algorithms."""


@dataclass
class Validation:
    """The loss on rows that are not trained on."""

    enable: bool = False
    """Compute it."""
    dataset: Dataset = "auto"
    """Kind of dataset_path, as of training.dataset."""
    dataset_path: str = ""
    """File or folder with the held-out data."""
    freq: Count = 10
    """Steps from one validation to the next."""
    steps: CountOrAuto = -1
    """Global batches (training.global_batch_size rows each) of a validation; -1: all rows."""
    local_batch_size: Count = 8
    """Rows of one forward on a batch rank."""
    seq_len: CountOrAuto = -1
    """Tokens in a row; -1: training.seq_len."""


@dataclass
class Config:
    """All sections, and which of their keys the user set."""

    job: Job = field(default_factory=Job)
    model: Model = field(default_factory=Model)
    training: Training = field(default_factory=Training)
    loss: Loss = field(default_factory=Loss)
    moe: MoE = field(default_factory=MoE)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    parallelism: Parallelism = field(default_factory=Parallelism)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    metrics: Metrics = field(default_factory=Metrics)
    profiling: Profiling = field(default_factory=Profiling)
    comm: Comm = field(default_factory=Comm)
    debug: Debug = field(default_factory=Debug)
    validation: Validation = field(default_factory=Validation)

    # Not sections: where the values are from, for messages and warnings.
    sources: dict[str, str] = field(default_factory=dict, compare=False, repr=False)
    """The file or flag that set each key, by dotted name."""
    user_set: dict[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Those that the user asked for: without defaults in a file, as a saved one holds every key."""
