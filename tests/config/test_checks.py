"""Checks between keys, model and world: each with what passes and what does not."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from tests.config.cases import Shape, checked, degrees, problems
from torchtitan_lite import device
from torchtitan_lite.config import (
    Config,
    ConfigError,
    check_config,
    load_and_check,
    load_config,
    resolve,
)
from torchtitan_lite.config.derived import SPLIT_BACKWARD_SCHEDULES

SCHEDULE = "--parallelism.pipeline_parallel_schedule="
LAYERS = "--parallelism.pipeline_parallel_layers_per_stage="
MICROBATCH = "--parallelism.pipeline_parallel_microbatch_size="
ZERO = "--parallelism.zero_stage="
RESHARD = "--parallelism.fsdp_reshard_after_forward="
MODULES = ["embed_tokens", *(f"layers.{index}" for index in range(6)), "norm", "lm_head"]
SINGLE = ("GPipe", "1F1B")
LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
V = ("ZBVZeroBubble", "DualPipeV")

PRODUCT = (
    "let pp x dp_replicate x cp x tp be 1, 2, 4 or 8, and parallelism.data_parallel_shard_degree -1"
)


def start(ranks: int) -> str:
    return f", or start {ranks} ranks (torchrun --nproc_per_node {ranks})"


MISFITS = [
    (degrees(tp=3), 8, "tensor_parallel_degree = 3",
     "pp 1 x dp_replicate 1 x dp_shard -1 x cp 1 x tp 3 is no mesh of 8 ranks; " + PRODUCT
     + start(3)),
    (degrees(dr=2, ds=3), 8, "data_parallel_shard_degree = 3",
     "pp 1 x dp_replicate 2 x dp_shard 3 x cp 1 x tp 1 is no mesh of 8 ranks; set "
     "parallelism.data_parallel_shard_degree to 4, or to -1 for the rest of the world"),
    (degrees(pp=2, tp=8), 8, "tensor_parallel_degree = 8",
     "pp 2 x dp_replicate 1 x dp_shard -1 x cp 1 x tp 8 is no mesh of 8 ranks; " + PRODUCT
     + start(16)),
    (degrees(tp=2), 1, "tensor_parallel_degree = 2",
     "pp 1 x dp_replicate 1 x dp_shard -1 x cp 1 x tp 2 is no mesh of 1 ranks; let pp x "
     "dp_replicate x cp x tp be 1, and parallelism.data_parallel_shard_degree -1" + start(2)),
    (degrees(cp=3), 8, "context_parallel_degree = 3",
     "pp 1 x dp_replicate 1 x dp_shard -1 x cp 3 x tp 1 is no mesh of 8 ranks; " + PRODUCT
     + start(3)),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "world", "value", "told"), MISFITS)
def test_degrees_that_do_not_fit_the_world(
    argv: list[str], world: int, value: str, told: str
) -> None:
    argv = [*argv, "--training.seq_len=48"]
    name = value.split()[0]
    assert problems(argv, world=world, shape=Shape(*(48,) * 6)) == [
        f"parallelism.{value} (from --parallelism.{name}): {told}"
    ]


@pytest.mark.parametrize("world", [6, 8, 12])
def test_the_advice_about_the_shard_degree_works(world: int) -> None:
    told = 0
    for dr, ds in itertools.product(range(1, 7), repeat=2):
        for line in problems(degrees(dr=dr, ds=ds), world=world):
            if world % dr == 0:
                told += 1
                shard = int(line.split("shard_degree to ")[1].split(",")[0])
                assert problems(degrees(dr=dr, ds=shard), world=world) == []
    assert told


@pytest.mark.parametrize(
    ("shape", "uneven", "fitting"),
    [
        (Shape(), "num_key_value_heads 4", "1, 2 or 4"),
        (Shape(num_key_value_heads=2), "num_key_value_heads 2", "1 or 2"),
        (
            Shape(num_attention_heads=12, num_key_value_heads=12),
            "num_attention_heads 12, num_key_value_heads 12",
            "1, 2 or 4",
        ),
        (
            Shape(num_key_value_heads=8, intermediate_size=100),
            "intermediate_size 100",
            "1, 2 or 4",
        ),
        (
            Shape(num_key_value_heads=8, padded_vocab_size=61),
            "padded_vocab_size 61",
            "1",
        ),
    ],
)
def test_sizes_that_tp_does_not_divide_are_named_with_both_numbers(
    shape: Shape, uneven: str, fitting: str
) -> None:
    (line,) = problems(degrees(tp=8), world=8, shape=shape)
    assert (
        f": 8 does not divide the model's {uneven}; degrees that divide all are {fitting}" in line
    )
    assert problems(degrees(tp=int(line[-1])), world=8, shape=shape) == []


def test_a_tp_that_divides_everything_passes() -> None:
    assert problems(degrees(tp=8), world=8, shape=Shape(num_key_value_heads=8)) == []


def test_sequence_parallelism_needs_rows_that_divide() -> None:
    odd = [*degrees(tp=4), "--training.seq_len=30"]
    (line,) = problems(odd, world=4)
    assert "shares the 30 tokens of a row among 4 ranks" in line
    assert "set training.seq_len to a multiple of 4, such as 32, or" in line
    assert problems([*odd, "--parallelism.no_enable_sequence_parallel"], world=4) == []
    assert problems([*degrees(tp=1), "--training.seq_len=30"], world=4) == []
    validation = ["--validation.enable", "--validation.dataset=synthetic"]
    validated = [*degrees(tp=4), *validation, "--validation.seq_len=30"]
    (line,) = problems(validated, world=4)
    assert line.startswith("validation.seq_len = 30 ") and "multiple of 4, such as 32" in line
    assert problems([*degrees(tp=4), *validation], world=4) == []
    # Rows as long as training's are told once.
    assert len(problems([*odd, *validation], world=4)) == 1


def test_the_global_batch_is_a_multiple_of_what_all_batch_ranks_read() -> None:
    argv = ["--training.local_batch_size=4", "--training.global_batch_size=21"]
    (line,) = problems(argv, world=2)
    assert line == (
        "training.global_batch_size = 21 (from --training.global_batch_size): "
        "training.global_batch_size 21 is not a multiple of training.local_batch_size 4 x "
        "2 batch ranks = 8; set training.global_batch_size to a multiple of 8, such as 24"
    )
    assert problems([*argv, "--training.global_batch_size=24"], world=2) == []
    (line,) = problems([*argv, "--training.global_batch_size=3"], world=2)
    assert line.endswith("set training.global_batch_size to a multiple of 8, such as 8")
    # Ranks that share rows are no batch ranks.
    argv = ["--training.local_batch_size=4", "--training.global_batch_size=20"]
    assert problems([*argv, *degrees(tp=2)], world=2) == []


def test_two_names_of_zero_stage_must_agree(tmp_path: Path) -> None:
    never = "--parallelism.fsdp_reshard_after_forward=never"
    (line,) = problems([never, "--parallelism.zero_stage=3"])
    assert "means parallelism.zero_stage = 2, which is set to 3; keep one of the two" in line
    assert problems([never, "--parallelism.zero_stage=2"]) == []
    assert problems([never]) == []
    path = tmp_path / "run.toml"
    path.write_text("[parallelism]\nzero_stage = 3\n")
    assert len(problems([never, "--job.config_file", str(path)])) == 1


# Parameters resharded after forward give wrong gradients under these schedules, in silence.
@pytest.mark.parametrize("schedule", SPLIT_BACKWARD_SCHEDULES)
@pytest.mark.parametrize("asked", [f"{ZERO}3", f"{RESHARD}always"])
def test_a_split_backward_refuses_parameters_that_are_gathered_anew(
    schedule: str, asked: str
) -> None:
    argv = [*degrees(pp=2), SCHEDULE + schedule]
    (line,) = problems([*argv, asked], world=4)
    assert line.startswith(asked.removeprefix("--").partition("=")[0])
    assert f"under {schedule}, which splits the backward, resharded parameters give wrong" in line
    assert line.endswith("set parallelism.zero_stage to 2, or choose another schedule")
    for passing in (
        argv,
        [*argv, f"{ZERO}2"],
        [*argv, f"{ZERO}1"],
        [*argv, f"{RESHARD}never"],
        [*degrees(pp=2), f"{SCHEDULE}1F1B", asked],
        [*degrees(pp=1), SCHEDULE + schedule, asked],
    ):
        assert problems(passing, world=4) == [], passing


def test_a_zero_stage_set_in_code_counts_as_set_where_user_set_says_so() -> None:
    config = load_config([*degrees(pp=2), f"{SCHEDULE}DualPipeV", "--training.dataset=synthetic"])
    config.training.local_batch_size = 8
    assert check_config(config, Shape(), 4) == []
    config.user_set["parallelism.zero_stage"] = "test"
    assert len(check_config(config, Shape(), 4)) == 1
    resolve(config, 4)
    assert config.parallelism.zero_stage == 3


def test_data_has_to_be_there(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "train.txt").write_text("some text")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "nothing").mkdir()
    base = [f"--model.hf_assets_path={tmp_path}", "--training.dataset=auto"]

    def path(name: str) -> str:
        return f"--training.dataset_path={tmp_path / name}"

    assert problems([*base, path("train.txt")]) == []
    (line,) = problems(base)
    assert line == (
        'training.dataset = "auto" (from --training.dataset): training.dataset auto reads a file '
        "or a folder, and none is given; set training.dataset_path, "
        'or training.dataset to "synthetic"'
    )
    (line,) = problems([*base, path("trian.txt")])
    assert line.startswith(f'training.dataset_path = "{tmp_path}/trian.txt" ')
    assert line.endswith("no such file or folder; correct the path")
    for name in ("empty.txt", "nothing"):
        (line,) = problems([*base, path(name)])
        assert line.endswith("is empty; give a file or a folder with data")
    validated = [*base, path("train.txt"), "--validation.enable"]
    (line,) = problems(validated)
    assert line.startswith("validation.enable = true (from --validation.enable): ")
    assert "set validation.dataset_path, or" in line
    assert problems([*validated, f"--validation.dataset_path={tmp_path / 'train.txt'}"]) == []


def test_text_needs_a_tokenizer_and_tokens_do_not(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("some text")
    argv = [f"--model.hf_assets_path={tmp_path}", f"--training.dataset_path={tmp_path}/train.txt"]
    (line,) = problems([*argv, "--training.dataset=text"])
    assert line.startswith(f'model.hf_assets_path = "{tmp_path}"')
    assert f"there is no {tmp_path}/tokenizer.json" in line
    assert problems([*argv, "--training.dataset=tokens"]) == []
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "index.json").write_text("{}")
    found = [f"--training.dataset_path={tmp_path}/shards", "--training.dataset=auto"]
    assert problems([*argv, *found]) == []
    assert problems(argv) == []  # synthetic, by tests.config.cases


def test_a_run_starts_from_a_folder_that_exists(tmp_path: Path) -> None:
    (tmp_path / "step-5").mkdir()
    (tmp_path / "file").write_text("x")

    def from_path(name: str) -> list[str]:
        return ["--checkpoint.enable", f"--checkpoint.initial_load_path={tmp_path / name}"]

    assert problems(from_path("step-5")) == []
    (line,) = problems(from_path("step-6"))
    assert line.endswith("no such folder; give the folder of a saved step")
    (line,) = problems(from_path("file"))
    assert line.endswith("no such folder; give the folder of a saved step")


def test_a_trace_fits_between_two_traces() -> None:
    argv = ["--profiling.enable_profiling", "--profiling.profile_freq=3"]
    (line,) = problems(argv)
    assert line.endswith("set profiling.profile_freq to at least 4")
    assert problems([*argv, "--profiling.profile_freq=4"]) == []
    assert problems(argv[1:]) == []


def test_problems_of_the_model_come_with_all_others() -> None:
    def resolve_model(config: Config) -> Shape:
        raise ConfigError("model.flavor is unknown\nmodel.overrides too")

    with pytest.raises(ConfigError) as caught:
        load_and_check(["--training.seqlen=3", "--training.dataset=synthetic"], 1, resolve_model)
    assert [line.split()[0] for line in str(caught.value).splitlines()] == [
        "training.seqlen",
        "model.flavor",
        "model.overrides",
    ]


def test_a_model_section_that_could_not_be_read_is_not_resolved() -> None:
    def resolve_model(config: Config) -> Shape:
        raise AssertionError("called")

    with pytest.raises(ConfigError, match="^model.flavour = "):
        load_and_check(["--model.flavour=8B", "--training.dataset=synthetic"], 1, resolve_model)


def test_checking_leaves_the_configuration_as_it_is() -> None:
    config = load_config(degrees(tp=3))
    check_config(config, Shape(), 8)
    assert config == load_config(degrees(tp=3))


def test_the_checked_configuration_and_its_model_are_handed_over() -> None:
    shape = Shape()
    config, model = load_and_check(["--training.dataset=synthetic"], 2, lambda config: shape)
    assert model is shape
    assert config == checked([], world=2)


# --- the pipeline ---------------------------------------------------------------------------


def _by_hand(*parts: list[str]) -> str:
    return f"--parallelism.module_fqns_per_model_part={json.dumps(parts)}"


@pytest.mark.parametrize("schedule", [*SINGLE, *LOOPED, *V])
def test_each_schedule_passes_with_its_own_number_of_stages(schedule: str) -> None:
    assert problems([*degrees(pp=2), SCHEDULE + schedule], world=2) == []


@pytest.mark.parametrize(
    ("schedule", "layers", "needs"),
    [
        *((name, 2, "3 stages, and {} on 2 ranks needs 2, one a rank") for name in SINGLE),
        *((name, 6, "1 stages, and {} on 2 ranks needs 2, one a rank") for name in SINGLE),
        *(
            (name, 2, "3 stages, and {} on 2 ranks needs a multiple of 2, at least 4")
            for name in LOOPED
        ),
        *(
            (name, 3, "2 stages, and {} on 2 ranks needs a multiple of 2, at least 4")
            for name in LOOPED
        ),
        *((name, 1, "6 stages, and {} on 2 ranks needs 4, two a rank") for name in V),
    ],
)
def test_layers_per_stage_must_give_the_stages_of_the_schedule(
    schedule: str, layers: int, needs: str
) -> None:
    argv = [*degrees(pp=2), SCHEDULE + schedule]
    (line,) = problems([*argv, f"{LAYERS}{layers}"], world=2)
    assert needs.format(schedule) in line
    assert line.startswith("parallelism.pipeline_parallel_layers_per_stage")


def test_layers_per_stage_that_fit_pass() -> None:
    assert problems([*degrees(pp=2), f"{LAYERS}3"], world=2) == []
    assert problems([*degrees(pp=2), f"{LAYERS}1", SCHEDULE + "Interleaved1F1B"], world=2) == []


def test_no_more_stages_than_layers() -> None:
    (line,) = problems(degrees(pp=8), world=8)
    assert "8 pipeline stages, and the model has 6 layers" in line
    assert line.endswith("set parallelism.pipeline_parallel_degree to at most 6")
    assert problems(degrees(pp=6), world=6) == []
    (line,) = problems([*degrees(pp=4), SCHEDULE + "LoopedBFS"], world=4)
    assert line.endswith("set parallelism.pipeline_parallel_degree to at most 3")


def test_parts_by_hand_that_hold_every_module_in_order_pass() -> None:
    argv = degrees(pp=2)
    assert problems([*argv, _by_hand(MODULES[:3], MODULES[3:])], world=2) == []
    four = _by_hand(MODULES[:2], MODULES[2:3], MODULES[3:6], MODULES[6:])
    assert problems([*argv, four, SCHEDULE + "LoopedBFS"], world=2) == []
    # Without a pipeline they are not looked at.
    assert problems([_by_hand(["nonsense"])]) == []


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        (
            [MODULES[:3], MODULES[3:8]],
            "nothing stands where lm_head belongs",
        ),
        (
            [MODULES[4:], MODULES[8:]],
            "layers.3 stands where embed_tokens belongs",
        ),
        ([["embed_tokens"], ["lm_head"]], "lm_head stands where layers.0 belongs"),
        ([MODULES, ["lm_head"]], "lm_head stands where nothing belongs"),
        (
            [["tok_embeddings", *MODULES[1:3]], MODULES[3:]],
            "tok_embeddings stands where embed_tokens belongs",
        ),
        (
            [MODULES[3:], MODULES[:3]],
            "layers.2 stands where embed_tokens belongs; name each module of the model once, "
            "in its order, at least one in each part",
        ),
        ([MODULES, []], "a part is empty; name each module"),
    ],
)
def test_parts_by_hand_name_what_is_wrong(parts: list[list[str]], told: str) -> None:
    (line,) = problems([*degrees(pp=2), _by_hand(*parts)], world=2)
    assert line.startswith("parallelism.module_fqns_per_model_part = ")
    assert told in line


def test_the_number_of_parts_by_hand_fits_the_schedule() -> None:
    three = _by_hand(MODULES[:3], MODULES[3:6], MODULES[6:])
    (line,) = problems([*degrees(pp=2), three], world=2)
    assert "3 stages, and 1F1B on 2 ranks needs 2, one a rank" in line
    assert "leave parallelism.module_fqns_per_model_part out" in line


def test_rows_divide_into_micro_batches() -> None:
    argv = [*degrees(pp=2), f"{MICROBATCH}3"]
    (line,) = problems(argv, world=2)
    assert line == (
        "parallelism.pipeline_parallel_microbatch_size = 3 "
        "(from --parallelism.pipeline_parallel_microbatch_size): 3 rows a micro-batch do not "
        "divide training.local_batch_size 8; set parallelism.pipeline_parallel_microbatch_size "
        "to 1, 2, 4 or 8"
    )
    assert problems([*argv, f"{MICROBATCH}4"], world=2) == []
    assert problems(argv[1:], world=1) == []


def test_1f1b_needs_a_micro_batch_a_stage() -> None:
    argv = [*degrees(pp=4), "--training.local_batch_size=2"]
    (line,) = problems(argv, world=4)
    assert "1F1B on 4 ranks needs at least 4 micro-batches" in line
    assert "2 rows over 1 batch ranks in micro-batches of 1 make 2" in line
    assert line.endswith("set training.global_batch_size to a multiple of 4, such as 4")
    assert problems([*argv, "--training.global_batch_size=4"], world=4) == []
    assert problems([*argv, SCHEDULE + "GPipe"], world=4) == []


def test_the_share_of_the_whole_global_batch_is_one_call_of_the_schedule() -> None:
    # 1 row at a time, 4 accumulation steps: 4 micro-batches, enough for 4 stages.
    argv = [*degrees(pp=4), "--training.local_batch_size=1", "--training.global_batch_size=8"]
    assert problems(argv, world=8) == []
    assert len(problems([*argv, *degrees(pp=4, dr=4)], world=16)) == 1


@pytest.mark.parametrize("schedule", [*SINGLE, *LOOPED, *V])
def test_the_advice_about_micro_batches_works(schedule: str) -> None:
    shape = Shape(num_hidden_layers=16)
    refused = 0
    for pp, rows, size in itertools.product((2, 4), (1, 2, 3, 5, 6, 7, 8, 10), (1, 2)):
        if rows % size:
            continue
        argv = [
            *degrees(pp=pp, dr=2),
            SCHEDULE + schedule,
            f"{MICROBATCH}{size}",
            f"--training.local_batch_size={rows}",
        ]
        for line in problems(argv, world=2 * pp, shape=shape):
            refused += 1
            for batch in (line.split()[-1], str(3 * int(line.split()[-1]))):
                advised = f"--training.global_batch_size={batch}"
                assert problems([*argv, advised], world=2 * pp, shape=shape) == [], line
    assert (refused > 0) == (schedule not in ("GPipe", "LoopedBFS", "ZBVZeroBubble"))


# --- attention backends -------------------------------------------------------------------------

BACKEND = "--model.attention_backend="
KEY = 'model.attention_backend = "{0}" (from --model.attention_backend): '


@pytest.mark.skipif(device.device_type() != "cpu", reason="says what the CPU lacks")
@pytest.mark.parametrize(("backend", "lacks"), [("flex", "backward"), ("varlen", "kernel")])
def test_a_backend_that_the_cpu_lacks_is_refused(backend: str, lacks: str) -> None:
    (line,) = problems([BACKEND + backend])
    assert line == KEY.format(backend) + f"cpu has no {lacks} for it; use sdpa"
    assert problems([BACKEND + "sdpa"]) == []


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "device_type", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


@pytest.mark.usefixtures("on_a_gpu")
def test_a_backend_has_its_dtypes() -> None:
    single = "--training.mixed_precision_param=float32"
    for argv in ([BACKEND + "flex"], [BACKEND + "flex", single], [BACKEND + "varlen"]):
        assert problems(argv) == []
    (line,) = problems([BACKEND + "varlen", single])
    told = "it has no kernel in float32; use sdpa, or set training.mixed_precision_param to "
    assert line == KEY.format("varlen") + told + "bfloat16"


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize("backend", ["flex", "varlen"])
def test_a_backend_refuses_a_model_that_it_cannot_run(backend: str) -> None:
    unable = {
        "the model has no attention": Shape(layer_type="state_space"),
        "no kernel drops attention weights (attention_dropout)": Shape(attention_dropout=0.1),
    }
    for reason, shape in unable.items():
        (line,) = problems([BACKEND + backend], shape=shape)
        assert line == KEY.format(backend) + reason + "; use sdpa"
        assert problems([BACKEND + "sdpa"], shape=shape) == []
    wide = Shape(kv_lora_rank=16, head_dim=64, qk_nope_head_dim=200, v_head_dim=128)
    lines = problems([BACKEND + backend], shape=wide)
    limit = "its heads have at most 256 channels, and the model's 264; use sdpa"
    assert lines == ([KEY.format(backend) + limit] if backend == "varlen" else [])
    latent = Shape(kv_lora_rank=16, head_dim=64, qk_nope_head_dim=128, v_head_dim=128)
    assert problems([BACKEND + backend], shape=latent) == []


@pytest.mark.usefixtures("on_a_gpu")
def test_context_parallelism_takes_a_backend_where_ranks_have_whole_rows() -> None:
    argv, method = [BACKEND + "flex", *degrees(cp=2)], "--parallelism.context_parallel_method="
    for other in ("allgather", "ring"):
        (line,) = problems([*argv, method + other], world=2)
        assert line == KEY.format("flex") + (
            f"context parallelism by {other} has kernels of its own; use sdpa, or "
            "parallelism.context_parallel_method ulysses"
        )
    assert problems([*argv, method + "ulysses"], world=2) == []
    assert problems([*argv, method + "ring", "--parallelism.context_parallel_degree=1"]) == []
