"""What a run trains: one frozen `Config`, complete before anything starts.

Pure: standard library only. Knows nothing of processes, hosts or moves. Profiles (profiles.py) build a `Config`;
`--set field=value` changes a field; `validate` refuses what can't work or isn't supported, by name, in one line.
"""
from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from migration.errors import UserError

DTYPES = ("fp32", "bf16", "fp16")
POSITION_EMBEDDINGS = ("learned_absolute", "rope")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One training job. Counts are integers, sizes are in elements; defaults are those of the tiny CPU profiles."""

    profile: str
    # the grid; a slot is one place in it, in Megatron's default order tp-cp-ep-dp-pp
    tp: int = 1
    pp: int = 1
    dp: int = 3
    vpp: int = 1  # model chunks a pipeline stage holds; above 1 is Megatron's interleaved schedule
    # the model
    num_layers: int = 4
    hidden_size: int = 64
    num_attention_heads: int = 4
    ffn_hidden_size: int = 0  # 0: four times hidden_size
    seq_length: int = 64
    vocab_size: int = 256
    position_embedding: str = "learned_absolute"
    tied_embeddings: bool = True
    first_stage_layers: int = 0  # 0: layers are divided evenly over the stages
    last_stage_layers: int = 0
    dropout: float = 0.1
    # the batch of one iteration: micro_batch_size * num_microbatches * dp samples
    micro_batch_size: int = 2
    num_microbatches: int = 2
    # numerics
    dtype: str = "bf16"
    initial_loss_scale: float = 65536.0  # fp16 only
    loss_scale_window: int = 1000  # fp16 only: iterations without overflow before the scale doubles
    # optimizer (Adam) and Megatron's data-parallel wrapper
    distributed_optimizer: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    bucket_size: int = 0  # elements; 0: Megatron's default
    lr: float = 3e-3
    min_lr: float = 0.0  # 0: a tenth of lr
    warmup_iterations: int = 5
    decay_iterations: int = 2000
    weight_decay: float = 0.01
    clip_grad: float = 1.0
    per_token_loss: bool = False  # average over tokens at the end of the reduction, not over micro-batches
    # parallel form
    sequence_parallel: bool = False
    recompute: bool = False
    # the run
    iterations: int = 40
    seed: int = 1234
    data: str = ""  # "": text that every Python installation carries
    # refused by name, for now
    transformer_engine: bool = False
    num_experts: int = 0
    context_parallel: int = 1
    fp8: bool = False
    cuda_graphs: bool = False
    nccl_user_buffers: bool = False

    @property
    def job_size(self) -> int:
        """Number of slots."""
        return self.tp * self.pp * self.dp

    @property
    def global_batch_size(self) -> int:
        """Samples of one iteration."""
        return self.micro_batch_size * self.num_microbatches * self.dp

    @property
    def lowest_lr(self) -> float:
        return self.min_lr or self.lr / 10

    @property
    def ffn_size(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size


def apply_settings(config: Config, settings: list[str]) -> Config:
    """`config` with each `field=value` of `settings` applied, validated.

    Raises UserError for an unknown field, a value of the wrong type, or a combination that can't work.
    """
    types = {f.name: f.type for f in dataclasses.fields(config)}
    changes = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        name = name.strip()
        if not equals:
            raise UserError(f"--set {setting}: write it as field=value, such as --set iterations=100")
        if name not in types or name == "profile":
            raise UserError(f"--set {setting}: there is no field {name!r}; fields are: "
                            + ", ".join(sorted(set(types) - {"profile"})))
        changes[name] = _parse(setting, types[name], text.strip())
    changed = dataclasses.replace(config, **changes)
    validate(changed)
    return changed


def _parse(setting: str, type_name: str, text: str) -> int | float | bool | str:
    try:
        if type_name == "bool":
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[text.lower()]
        return {"int": int, "float": float, "str": str}[type_name](text)
    except (KeyError, ValueError):
        wanted = "true or false" if type_name == "bool" else type_name
        raise UserError(f"--set {setting}: {text!r} is not a value of type {wanted}") from None


def validate(config: Config) -> None:
    """Raises UserError, one line, for the first thing in `config` that is refused or can't work."""
    _refuse_unsupported(config)
    for name in ("tp", "pp", "dp", "vpp", "num_layers", "hidden_size", "num_attention_heads", "seq_length",
                 "vocab_size", "micro_batch_size", "num_microbatches", "iterations", "warmup_iterations"):
        if getattr(config, name) < 1:
            raise UserError(f"{name}={getattr(config, name)}: must be at least 1")
    for name, divisor in (("num_attention_heads", "tp"), ("vocab_size", "tp"), ("hidden_size", "num_attention_heads")):
        if getattr(config, name) % getattr(config, divisor):
            raise UserError(f"{name}={getattr(config, name)} is not a multiple of "
                            f"{divisor}={getattr(config, divisor)}")
    if config.dtype not in DTYPES:
        raise UserError(f"dtype={config.dtype!r}: must be one of {', '.join(DTYPES)}")
    if config.position_embedding not in POSITION_EMBEDDINGS:
        raise UserError(f"position_embedding={config.position_embedding!r}: must be one of "
                        + ", ".join(POSITION_EMBEDDINGS))
    if not 0.0 <= config.dropout < 1.0:
        raise UserError(f"dropout={config.dropout}: must be at least 0 and below 1")
    if not (0.0 <= config.min_lr <= config.lr and 0.0 < config.lr < float("inf")):
        raise UserError(f"lr={config.lr}, min_lr={config.min_lr}: 0 <= min_lr <= lr must hold, and lr be above 0")
    if config.initial_loss_scale < 1 or config.loss_scale_window < 1:
        raise UserError(f"initial_loss_scale={config.initial_loss_scale} and loss_scale_window="
                        f"{config.loss_scale_window} must be at least 1")
    if config.ffn_hidden_size < 0 or config.ffn_size % config.tp:
        raise UserError(f"ffn_hidden_size={config.ffn_hidden_size} must be 0 (four times hidden_size) or a positive "
                        f"multiple of tp={config.tp}")
    if config.bucket_size < 0:
        raise UserError(f"bucket_size={config.bucket_size}: must be 0 (Megatron's default) or a number of elements")
    if config.position_embedding == "rope" and config.hidden_size // config.num_attention_heads % 2:
        raise UserError("position_embedding=rope needs an even head size, not hidden_size/num_attention_heads="
                        f"{config.hidden_size // config.num_attention_heads}")
    if config.warmup_iterations >= config.decay_iterations:
        raise UserError(f"warmup_iterations={config.warmup_iterations} must be below "
                        f"decay_iterations={config.decay_iterations}")
    _validate_pipeline(config)
    _validate_overlap(config)


def _refuse_unsupported(config: Config) -> None:
    refused = (("transformer_engine", config.transformer_engine, "Transformer Engine layers"),
               ("num_experts", config.num_experts, "mixture of experts (MoE)"),
               ("context_parallel", config.context_parallel != 1, "context parallelism"),
               ("fp8", config.fp8, "FP8"),
               ("cuda_graphs", config.cuda_graphs, "CUDA graphs, which capture communicators"),
               ("nccl_user_buffers", config.nccl_user_buffers, "NCCL user buffers, registered with one communicator"))
    for field, asked, what in refused:
        if asked:
            raise UserError(f"{field}={getattr(config, field)}: no support for {what} yet; leave this field alone")


def _validate_pipeline(config: Config) -> None:
    if config.first_stage_layers or config.last_stage_layers:
        middle = config.num_layers - config.first_stage_layers - config.last_stage_layers
        if config.pp < 3 or min(config.first_stage_layers, config.last_stage_layers) < 1 or middle % (config.pp - 2) \
                or middle <= 0 or config.vpp > 1:
            raise UserError("first_stage_layers and last_stage_layers go together, need pp of at least 3, vpp 1, and "
                            f"leave a multiple of pp-2 layers for the middle stages (num_layers={config.num_layers}, "
                            f"pp={config.pp})")
    elif config.num_layers % (config.pp * config.vpp):
        raise UserError(f"num_layers={config.num_layers} is not a multiple of pp*vpp={config.pp * config.vpp}")
    if config.vpp > 1:
        if config.pp < 2:
            raise UserError(f"vpp={config.vpp}: the interleaved schedule needs pp of at least 2, not pp={config.pp}")
        if config.num_microbatches % config.pp:
            raise UserError(f"vpp={config.vpp}: num_microbatches={config.num_microbatches} is not a multiple of "
                            f"pp={config.pp}")


def _validate_overlap(config: Config) -> None:
    if config.overlap_param_gather and not (config.distributed_optimizer and config.overlap_grad_reduce):
        raise UserError("overlap_param_gather=true needs distributed_optimizer=true and overlap_grad_reduce=true")
    if config.sequence_parallel and config.tp < 2:
        raise UserError(f"sequence_parallel=true needs tp of at least 2, not tp={config.tp}")
    if config.sequence_parallel and config.seq_length % config.tp:
        raise UserError(f"sequence_parallel=true: seq_length={config.seq_length} is not a multiple of tp={config.tp}")
