"""What must hold between the configuration, the model and the device that runs it.

As checks.py, which calls these. Proven in tests/config/test_model_checks.py, test_checks.py and
test_context_checks.py.
"""

from __future__ import annotations

import math

from torchtitan_lite.config import derived
from torchtitan_lite.config.derived import divisors
from torchtitan_lite.config.facts import (
    CONTEXT,
    PIPELINE,
    REPLICATE,
    SHARD,
    TENSOR,
    Facts,
    Findings,
    multiple,
    row_lengths,
)
from torchtitan_lite.config.schema import get_value, one_of

EXPERT = "parallelism.expert_parallel_degree"
BACKEND, MAX_VARLEN_WIDTH = "model.attention_backend", 256
FLOAT8, EXPERTS_FLOAT8 = "quantize.linear.float8", "quantize.grouped_mm.float8"


def tensor_parallel(facts: Facts) -> Findings:
    degree, model = facts.config.parallelism.tensor_parallel_degree, facts.model
    if model is None or degree == 1:
        return
    if model.layer_type == "state_space":
        fix = f"set it to 1, and {PIPELINE} or {SHARD} higher"
        yield (TENSOR,), f"a state-space layer cannot be cut over {degree} ranks", fix
        return
    # Not those of what lies whole on every rank.
    names = ["num_attention_heads", "num_key_value_heads", "intermediate_size", "padded_vocab_size"]
    if model.kv_lora_rank is not None:  # keys and values are made for each query head
        names.remove("num_key_value_heads")
    if model.has_experts(0):  # no layer has the one MLP
        names.remove("intermediate_size")
    sizes = {name: getattr(model, name) for name in names}
    uneven = [f"{name} {size}" for name, size in sizes.items() if size % degree]
    if uneven:
        fix = f"degrees that divide all are {one_of(divisors(math.gcd(*sizes.values())))}"
        yield (TENSOR,), f"{degree} does not divide the model's {', '.join(uneven)}", fix


def expert_parallel(facts: Facts) -> Findings:
    parallelism, model, world = facts.config.parallelism, facts.model, facts.world_size
    degree = parallelism.expert_parallel_degree
    if degree == 1 or model is None:
        return
    shard = derived.shard_degree(parallelism, world) or 0  # 0: said by _world
    ranks = shard * parallelism.context_parallel_degree * parallelism.tensor_parallel_degree
    if not model.num_experts:
        yield (EXPERT,), f"the model has no experts to share among {degree} ranks", "set it to 1"
        return
    fix = f"set it to {one_of(divisors(math.gcd(ranks, model.num_experts)))}"
    if model.num_experts % degree:
        yield (EXPERT,), f"{degree} does not divide the model's {model.num_experts} experts", fix
    elif ranks % degree:
        reason = f"experts are shared among dp_shard x cp x tp = {ranks} ranks, which {degree} "
        reason += "does not divide"
        yield (EXPERT, SHARD, TENSOR, CONTEXT, REPLICATE, PIPELINE), reason, fix


def expert_kernel(facts: Facts) -> Findings:
    """moe.kernel = grouped, where there is such a kernel."""
    config, model = facts.config, facts.model
    if config.moe.kernel != "grouped" or model is None or not model.num_experts:
        return
    from torchtitan_lite import device  # takes torch, which no other configuration waits for

    kind, dtype = device.device_type(), config.training.mixed_precision_param
    known = device.grouped_kernel_dtypes(kind)
    keys, other = ("moe.kernel", "training.mixed_precision_param"), "set it to loop or auto"
    if dtype not in known:
        fix = "".join(f", or {keys[1]} to {name}" for name in known)
        yield keys, f"there is no such kernel on {kind} in {dtype}", other + fix
        return
    unit = {"bfloat16": 8, "float32": 4}[dtype]  # 16 bytes
    for name in ("hidden_size", "moe_intermediate_size"):
        width = getattr(model, name)
        if width % unit:
            below = width // unit * unit
            nearest = [size for size in (below, below + unit) if size]
            reason = f"in {dtype} it takes multiples of {unit}, and {name} is {width}"
            yield keys, reason, f"{other}, or {name} to {one_of(nearest)}"


def attention_backend(facts: Facts) -> Findings:
    """model.attention_backend: the device, the dtype and the model have it."""
    config, model = facts.config, facts.model
    backend, dtype = config.model.attention_backend, config.training.mixed_precision_param
    if backend == "sdpa" or model is None:
        return
    from torchtitan_lite import device  # as above

    kind, fix = device.device_type(), "use sdpa"
    known = device.attention_dtypes(kind, backend)
    if not known:
        lacks = "backward" if backend == "flex" else "kernel"
        yield (BACKEND,), f"{kind} has no {lacks} for it", fix
    elif dtype not in known:
        keys = (BACKEND, "training.mixed_precision_param")
        yield keys, f"it has no kernel in {dtype}", f"{fix}, or set {keys[1]} to {one_of(known)}"
    width = max(model.head_dim + model.qk_nope_head_dim, model.v_head_dim)
    too_wide = backend == "varlen" and width > MAX_VARLEN_WIDTH
    method = derived.in_force(config, derived.CONTEXT_METHOD)
    exchanged = config.parallelism.context_parallel_degree > 1 and method != "ulysses"
    unable = {
        "the model has no attention": model.layer_type == "state_space",
        "no kernel drops attention weights (attention_dropout)": model.attention_dropout > 0,
        f"its heads have at most {MAX_VARLEN_WIDTH} channels, and the model's {width}": too_wide,
        f"context parallelism by {method} has kernels of its own": exchanged,
    }
    other = f", or {derived.CONTEXT_METHOD} ulysses" if exchanged else ""
    for reason in (reason for reason, is_so in unable.items() if is_so):
        yield (BACKEND, CONTEXT, derived.CONTEXT_METHOD), reason, fix + other


def float8(facts: Facts) -> Findings:
    """quantize.linear.float8: an accelerator has kernels for it; a CPU gains nothing by any."""
    config, float8 = facts.config, facts.config.quantize.linear.float8
    fqns, names = f"{EXPERTS_FLOAT8}.fqns", config.quantize.grouped_mm.float8.fqns
    if not float8.recipe_name:
        if names:
            reason = "experts follow the recipe of the linears, of which there is none"
            yield (fqns, f"{FLOAT8}.recipe_name"), reason, f"set {FLOAT8}.recipe_name to one"
        return
    for key in (f"{FLOAT8}.filter_fqns", f"{FLOAT8}.include_fqns", fqns):
        if "" in get_value(config, key):
            yield (key,), "an empty entry is a part of every name", "remove it"
    powers, offload = f"{FLOAT8}.round_scales_to_power_of_2", "training.enable_cpu_offload"
    gathers = {"enable_fsdp_float8_all_gather": "weights", "enable_tp_float8_all_gather": "rows"}
    for last, what in gathers.items():
        gather, on = f"{FLOAT8}.{last}", getattr(float8, last)
        if on and not float8.round_scales_to_power_of_2:
            reason = f"{what} are cast again where they arrive, which changes digits unless scales "
            yield (gather,), f"{reason}are powers of two", f"set {powers} to true"
        if on and what == "weights" and config.training.enable_cpu_offload:
            reason = "weights in host memory are sent from there as they are"
            yield (gather, offload), reason, "turn one off"
    if names and not float8.round_scales_to_power_of_2:
        reason = "experts multiply the numbers in bfloat16, which holds them only where scales are "
        yield (fqns,), f"{reason}powers of two", f"set {powers} to true"
    if float8.recipe_name != "tensorwise" and float8.scaling == "delayed":
        reason = "the steps before are known of a whole tensor, and this recipe has a scale a block"
        fix = "use tensorwise, or dynamic scaling"
        yield (f"{FLOAT8}.scaling", f"{FLOAT8}.recipe_name"), reason, fix
    if float8.emulate:
        return
    from torchtitan_lite import device  # as above

    kind, dtype = device.device_type(), config.training.mixed_precision_param
    known = device.float8_recipes(kind, dtype)
    if kind != "cpu" and names:
        fix = f"set {FLOAT8}.emulate to true, which is slower than high precision, or name none"
        yield (fqns,), f"this {kind} device has no kernel for experts in float8", fix
    if kind != "cpu" and float8.recipe_name not in known:
        fix = f"set {FLOAT8}.emulate to true, which is slower than high precision"
        fix = f"use {one_of(known)}, or {fix}" if known else fix
        keys = (f"{FLOAT8}.recipe_name", "training.mixed_precision_param")
        yield keys, f"this {kind} device has no kernel for it in {dtype}", fix


def tokens_of_a_row(facts: Facts) -> Findings:
    """Context and sequence parallelism share the tokens of a row evenly."""
    config, parallelism = facts.config, facts.config.parallelism
    tensor, context = parallelism.tensor_parallel_degree, parallelism.context_parallel_degree
    switch = "parallelism.enable_sequence_parallel"
    shares = tensor if parallelism.enable_sequence_parallel else 1
    for name, length in row_lengths(config).items():
        keys = (name, CONTEXT, TENSOR, switch, "validation.enable")
        unit = math.lcm(2 * context, context * shares) if context > 1 else shares
        if length % unit == 0:
            continue
        fix = f"set {name} to {multiple(length, unit)}"
        if context > 1:
            reason = f"context parallelism cuts the {length} tokens of a row in 2 x {context} "
            reason += "pieces"
            if shares > 1:
                reason += f", and sequence parallelism a rank's two among {shares}"
            yield keys, f"{reason}, which does not divide them", fix
        else:
            reason = f"sequence parallelism shares the {length} tokens of a row among {tensor} "
            reason += "ranks, which does not divide them"
            yield keys, reason, f"{fix}, or {switch} to false"


def context_parallel(facts: Facts) -> Findings:
    parallelism, model = facts.config.parallelism, facts.model
    degree, tensor = parallelism.context_parallel_degree, parallelism.tensor_parallel_degree
    if degree == 1 or model is None:
        return
    alone = {
        "layers with a state that passes along the row": model.layer_type == "state_space",
        "dropout": model.has_dropout,
        "rope_type dynamic, whose angles follow the length of each row": model.rope_follows_length,
    }
    for what, has in alone.items():
        if has:
            reason = f"the model has {what}, which needs whole rows on a rank"
            yield (CONTEXT,), reason, "set it to 1"
    method = derived.in_force(facts.config, derived.CONTEXT_METHOD)
    name = "num_attention_heads" if model.kv_lora_rank else "num_key_value_heads"
    heads = getattr(model, name)
    kv_heads = heads // tensor
    if method == "ulysses" and kv_heads % degree:
        reason = f"ulysses shares {kv_heads} KV heads ({name} {heads} / tp {tensor}) "
        reason += f"among {degree} ranks"
        fix = f"set {CONTEXT} to {one_of(divisors(kv_heads))}, or the method to allgather or ring"
        yield (derived.CONTEXT_METHOD, derived.ROTATE_METHOD, CONTEXT, TENSOR), reason, fix


def learned_positions(facts: Facts) -> Findings:
    if facts.model is None or not facts.model.learned_positions:
        return
    longest = facts.model.max_position_embeddings
    for name, length in row_lengths(facts.config).items():
        if length > longest:
            reason = f"the model has an embedding for {longest} positions"
            yield (name,), reason, f"set it to at most {longest}, or raise the model's own"


def compile_pieces(facts: Facts) -> Findings:
    """What torch.compile cannot capture whole."""
    config, model, enable = facts.config, facts.model, "compile.enable"
    options, parallelism = config.compile, config.parallelism
    if not options.enable:
        return
    if not options.components:
        fix = f"name model, loss or both, or set {enable} to false"
        yield ("compile.components", enable), "nothing would be compiled", fix
        return
    from torch._dynamo import list_backends  # takes torch, which no other configuration waits for

    if options.backend not in list_backends(exclude_tags=()):
        reason = f"torch has no such compiler, but {', '.join(list_backends())}"
        yield ("compile.backend", enable), reason, "set it to inductor"
    if "model" not in options.components:
        return
    documents, instead = config.training.document_mask, "compile.components to loss"
    if parallelism.context_parallel_degree > 1:
        method = derived.in_force(config, derived.CONTEXT_METHOD)
        keys = [derived.CONTEXT_METHOD, derived.ROTATE_METHOD, CONTEXT, enable]
        if method == "ring":
            reason = "messages from rank to rank are part of no graph"
            yield keys, reason, f"set {keys[0]} to allgather or ulysses, or {instead}"
        elif method == "allgather" and documents:
            reason = "the host reads where documents end, and that is part of no graph"
            keys.append("training.document_mask")
            yield keys, reason, f"set {keys[0]} to ulysses, or {instead}"
    if config.model.attention_backend == "varlen" and documents:
        reason = "the number of documents is a shape, and those of a graph are fixed"
        keys = [BACKEND, "training.document_mask", enable]
        yield keys, reason, f"use flex or sdpa, or set {instead}"
    activation = config.activation_checkpoint
    per_op = activation.mode == "selective" and activation.selective_ac_option == "op"
    if per_op and model is not None and model.num_experts:
        reason = "layers with experts are compiled in pieces, and of what lies outside of a "
        reason += "piece no operator can be kept"
        keys = ["activation_checkpoint.selective_ac_option", "activation_checkpoint.mode", enable]
        yield keys, reason, f"set it to a number, or {instead}"


def memory_budget(facts: Facts) -> Findings:
    """activation_checkpoint.mode = memory_budget, which a compiler of whole layers carries out."""
    options, model = facts.config.compile, facts.model
    keys = ("activation_checkpoint.mode", "compile.enable", "compile.components")
    if facts.config.activation_checkpoint.mode != "memory_budget":
        return
    if not options.enable or "model" not in options.components:
        fix = f"set {keys[1]} to true with model among {keys[2]}, or use selective"
        yield keys, "what is kept is chosen by the compiler of the layers, which is off", fix
    elif not options.backend.startswith(("inductor", "aot_")):
        reason = f"{options.backend} runs what it captures as it is, and keeps what eager keeps"
        yield (keys[0], "compile.backend"), reason, "set compile.backend to inductor"
    elif model is not None and model.num_experts:
        reason = "layers with experts are compiled in pieces, and what lies outside of a piece "
        yield keys, f"{reason}would be kept whatever the budget", "use full or selective"
