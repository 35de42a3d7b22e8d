"""Every key there is: a section is a dataclass, a key is a field, the string below it is its help.

Nothing else declares a key, but quantizing.py those of float8, and watching.py those that only
watch a run. The loader (load.py) takes names, types, bounds and defaults from here, `--help`
(schema.py) reads the strings from the file, and the saved TOML walks the fields. To add a key, add
its field and its sentence here and, if it acts only together with another, a row in effects.py;
tests/config/test_keys.py asks for the rest.

    --training.seq_len 512          Config().training.seq_len
    [training]                      the same, in TOML
    seq_len = 512
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torchtitan_lite.config.bounds import (
    BelowOne,
    CheckpointPart,
    Count,
    CountOrAuto,
    CountOrZero,
    Dataset,
    EveryNth,
    Kept,
    NormType,
    NotNegative,
    Positive,
    Schedule,
    Share,
    Step,
    Text,
    ZeroStage,
)
from torchtitan_lite.config.quantizing import Quantize
from torchtitan_lite.config.watching import Comm, Debug, Metrics, Profiling


class ConfigError(ValueError):
    """A mistake of the user's, told one a line: key, value, reason, fix. Ends train.py with 2."""


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
    attention_backend: Literal["sdpa", "flex", "varlen"] = "sdpa"
    """Kernels of attention (models/backends.py): sdpa runs everywhere; on rows of many documents,
    or with a window, flex and varlen pass over what a token does not see."""


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
    document_mask: bool = False
    """Let a token see its own document alone, and count positions from its beginning."""
    packing: Literal["concatenate", "best_fit"] = "concatenate"
    """Cut the stream of documents into rows, or fill rows with whole documents and padding."""
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
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of AdamW's moments; bfloat16 takes 4 bytes a parameter less, and is rounded up or
    down at random so that the mean stays right."""
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
    context_parallel_method: Literal["allgather", "ring", "ulysses"] = "allgather"
    """How their tokens meet in attention: every rank gathers all keys and values, or these go
    round the ranks, or each rank takes whole rows of some heads."""
    context_parallel_load_balancer: Literal["headtail", "none"] = "headtail"
    """Which tokens a rank takes: a piece from either end of a row, so that each has as much to
    do, or neighbours."""
    context_parallel_rotate_method: Literal["default", "allgather", "alltoall"] = "default"
    """Other name of context_parallel_method: alltoall is ring, default leaves it."""
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

    mode: Literal["none", "full", "selective", "memory_budget"] = "selective"
    """Nothing, every layer, what selective_ac_option says, or what the compiler chooses."""
    selective_ac_option: EveryNth = "2"
    """Every n-th layer ("2"), or in each layer what costs little to compute again ("op")."""
    memory_budget: Share = 0.5
    """Of what a compiled layer keeps between its input alone (0) and what it would keep (1)."""


@dataclass
class Compile:
    """Graphs in the place of single operators: torch.compile, a layer at a time."""

    enable: bool = False
    """Compile what components names."""
    components: list[Literal["model", "loss"]] = field(default_factory=lambda: ["model", "loss"])
    """What is compiled: the layers of the model, the loss from hidden states."""
    backend: Text = "inductor"
    """Compiler of torch.compile; aot_eager captures graphs and runs their operators one by one."""


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
    compile: Compile = field(default_factory=Compile)
    metrics: Metrics = field(default_factory=Metrics)
    profiling: Profiling = field(default_factory=Profiling)
    comm: Comm = field(default_factory=Comm)
    debug: Debug = field(default_factory=Debug)
    validation: Validation = field(default_factory=Validation)
    quantize: Quantize = field(default_factory=Quantize)

    # Not sections: where the values are from, for messages and warnings.
    sources: dict[str, str] = field(default_factory=dict, compare=False, repr=False)
    """The file or flag that set each key, by dotted name."""
    user_set: dict[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Those that the user asked for: without defaults in a file, as a saved one holds every key."""
