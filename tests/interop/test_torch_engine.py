"""`tessera.torch.engine` has DeepSpeed's calls, and trains as one process that has the samples of all ranks."""

from __future__ import annotations

import inspect
import json
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("torch")

from deepspeed_steps import check_alike
from run_torch import run_ranks
from sampling import sample
from tessera.torch import engine

HERE = Path(__file__).parent
JOBS = HERE / "torch_engine_jobs.py"


def names_of(function: object) -> str:
    return " ".join(name for name in inspect.signature(function).parameters if name != "self")  # type: ignore[arg-type]


def test_signatures_are_deepspeeds() -> None:
    assert names_of(engine.initialize) == (
        "args model optimizer model_parameters training_data lr_scheduler distributed_port mpu dist_init_required "
        "collate_fn config mesh_param config_params"
    )
    assert names_of(engine.init_distributed) == (
        "dist_backend auto_mpi_discovery distributed_port verbose timeout init_method dist_init_required config rank "
        "world_size"
    )
    kind = engine.DeepSpeedEngine
    saves = "save_dir tag client_state save_latest exclude_frozen_parameters client_sd"  # the last: an alias
    assert names_of(kind.save_checkpoint) == saves
    assert names_of(kind.load_checkpoint) == (
        "load_dir tag load_module_strict load_optimizer_states load_lr_scheduler_states load_module_only custom_load_fn"
    )
    assert names_of(kind.save_16bit_model) == "save_dir save_filename exclude_frozen_parameters"
    assert engine.deepspeed_initialize is engine.initialize


def test_it_trains_as_one_process(tmp_path: Path) -> None:
    """With every option; and each error is named."""
    run_ranks(JOBS, 2, "checks", tmp_path)


def test_it_prints_what_the_configuration_asks_for(tmp_path: Path) -> None:
    printed = run_ranks(JOBS, 2, "checks", tmp_path, "what_is_printed")
    assert printed.count("step=2, skipped=0, lr=[0.02], mom=[(0.9, 0.999)]") == 1, printed
    assert printed.count("time since the last printed step: forward ") == 2, printed
    assert printed.count('"ds_config"') == 1, printed


@pytest.mark.slow
@pytest.mark.parametrize("ranks", sample([1, 3, 4], 1, "the engine's ranks"))
def test_so_it_does_at_other_numbers_of_ranks(tmp_path: Path, ranks: int) -> None:
    names = [
        "trains_as_one_process",
        "half_precision",
        "overflow_skips_the_step_on_all_ranks",
        "a_save_goes_on_as_if_nothing_had_been",
        "pipelines",
        "tensor_parallelism",
        "parameters_among_few_ranks",
        "pipelines_of_half_precision",
    ]
    run_ranks(JOBS, ranks, "checks", tmp_path, *names)


@pytest.mark.parametrize(
    ("saving", "stage", "loading", "other", "dtype"),
    sample(
        [(2, 0, 3, 3, "fp32"), (3, 3, 2, 0, "fp32"), (2, 1, 1, 2, "bf16"), (3, 2, 2, 1, "fp16"), (1, 0, 2, 0, "bf16")],
        2,
        "checkpoints of the engine",
    ),
)
def test_a_checkpoint_loads_at_another_world_size_and_stage(
    tmp_path: Path, saving: int, stage: int, loading: int, other: int, dtype: str
) -> None:
    run_ranks(JOBS, saving, "saves", tmp_path, stage)
    run_ranks(JOBS, loading, "loads", tmp_path, other, dtype)


def test_a_rank_that_does_not_save_is_named(tmp_path: Path) -> None:
    run_ranks(JOBS, 3, "late", tmp_path / "checkpoints")


def test_each_step_is_that_of_deepspeed(tmp_path: Path) -> None:
    """Losses, norms, loss scales and learning rates, as DeepSpeed wrote them."""
    run_ranks(HERE / "deepspeed_steps.py", 2, "tessera", tmp_path)
    recorded = json.loads((HERE / "deepspeed_steps.json").read_text(encoding="utf-8"))
    for rank in range(2):
        check_alike(json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")), recorded[str(rank)])


@pytest.mark.parametrize(
    ("case", "ranks", "stage", "dtype"),
    sample(
        [
            ("stage0-fp32-2", 1, 1, "fp32"),
            ("stage1-fp32-3", 2, 3, "fp32"),
            ("stage1-bf16-2", 3, 2, "bf16"),
            ("stage2-fp32-2", 3, 0, "fp32"),
            ("stage2-fp16-2", 2, 2, "fp16"),
            ("stage2-tiny-3", 2, 3, "fp32"),
            ("stage3-bf16-3", 2, 3, "bf16"),
        ],
        2,
        "DeepSpeed's checkpoints",
    ),
)
def test_it_goes_on_from_deepspeeds_checkpoints(tmp_path: Path, case: str, ranks: int, stage: int, dtype: str) -> None:
    with tarfile.open(HERE / "deepspeed" / "files.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    run_ranks(HERE / "torch_engine_reads_job.py", ranks, tmp_path / case, tmp_path / "own", stage, dtype)
