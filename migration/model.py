"""megatron-core's own GPT, data-parallel wrapper, optimizer and scheduler, built from a Config.

Built for a slot whose process groups exist already (groups.py). Knows nothing of moves.
"""
from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from migration.config import Config
from migration.device import is_cpu

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class SequenceParallelLayerNorm(torch.nn.LayerNorm):
    """A layer norm whose parameters say that they see a slice of the sequence; Megatron's torch norm refuses that."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = self.bias.sequence_parallel = config.sequence_parallel


def initialize_groups(config: Config) -> None:
    """Megatron's process groups and seeds for this process's slot. Needs torch's world to be open."""
    parallel_state.initialize_model_parallel(
        config.tp, config.pp, virtual_pipeline_model_parallel_size=config.vpp if config.vpp > 1 else None,
        create_gloo_process_groups=False)


def seed_everything(config: Config) -> None:
    """Seeds of the weights and of every RNG stream; a slot's streams depend on its place in the grid alone."""
    import random

    import numpy as np
    stage = parallel_state.get_pipeline_model_parallel_rank()
    random.seed(config.seed + 100 * stage)
    np.random.seed(config.seed + 100 * stage)
    torch.manual_seed(config.seed + 100 * stage)
    tensor_parallel.model_parallel_cuda_manual_seed(config.seed + 100 * stage, force_reset_rng=True)


def build_transformer_config(config: Config) -> TransformerConfig:
    dtype = TORCH_DTYPES[config.dtype]
    uneven = {}
    if config.first_stage_layers:
        uneven = {"num_layers_in_first_pipeline_stage": config.first_stage_layers,
                  "num_layers_in_last_pipeline_stage": config.last_stage_layers}
    return TransformerConfig(
        num_layers=config.num_layers, hidden_size=config.hidden_size, ffn_hidden_size=config.ffn_size,
        num_attention_heads=config.num_attention_heads, tensor_model_parallel_size=config.tp,
        pipeline_model_parallel_size=config.pp,
        virtual_pipeline_model_parallel_size=config.vpp if config.vpp > 1 else None,
        sequence_parallel=config.sequence_parallel, params_dtype=dtype,
        # on a GPU in a thousandth of the time: a core makes 0.1 billion normal numbers a second
        use_cpu_initialization=is_cpu(),
        pipeline_dtype=dtype, bf16=config.dtype == "bf16", fp16=config.dtype == "fp16",
        hidden_dropout=config.dropout, attention_dropout=config.dropout, deterministic_mode=True,
        bias_dropout_fusion=False, bias_activation_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, calculate_per_token_loss=config.per_token_loss,
        # two sends between one pair of stages in one batch arrive in the wrong order on Gloo: one by one is right
        batch_p2p_comm=config.vpp == 1, overlap_p2p_comm=config.vpp > 1,
        recompute_granularity="full" if config.recompute else None,
        recompute_method="uniform" if config.recompute else None,
        recompute_num_layers=1 if config.recompute else None, **uneven)


def _layer_spec(config: Config, transformer: TransformerConfig, chunk: int | None) -> Any:
    spec = get_gpt_layer_local_spec()
    if not config.sequence_parallel:
        return spec
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = SequenceParallelLayerNorm
    spec.submodules.sharded_state_dict_keys_map = {}
    num_layers = get_num_layers_to_build(transformer, vp_stage=chunk)
    return TransformerBlockSubmodules(layer_specs=[spec] * num_layers, layer_norm=SequenceParallelLayerNorm)


def build_chunks(config: Config, transformer: TransformerConfig, device: torch.device) -> list[Any]:
    """The slot's model chunks (one, or vpp of them), each in megatron-core's data-parallel wrapper."""
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=config.overlap_grad_reduce,
        overlap_param_gather=config.overlap_param_gather, use_distributed_optimizer=config.distributed_optimizer,
        bucket_size=config.bucket_size or None,
        check_for_nan_in_grad=config.dtype != "fp16")  # an fp16 overflow is normal: the scaler skips the step
    chunks = []
    for i in range(config.vpp):
        chunk = i if config.vpp > 1 else None
        place = {"ignore_virtual": chunk is None, "vp_stage": chunk}
        model = GPTModel(
            transformer, _layer_spec(config, transformer, chunk), vocab_size=config.vocab_size,
            max_sequence_length=config.seq_length, pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            share_embeddings_and_output_weights=config.tied_embeddings,
            position_embedding_type="rope" if config.position_embedding == "rope" else "learned_absolute",
            vp_stage=chunk)
        model = model.to(device)
        if config.dtype != "fp32":
            model = Float16Module(transformer, model)
        chunks.append(DistributedDataParallel(transformer, ddp, model, disable_bucketing=bool(chunk)))
    return chunks


def tie_embeddings(config: Config, chunks: list[Any]) -> bool:
    """Give the last stage's output weight the first stage's word embeddings. Collective over each embedding group.

    Returns whether this process has one of the copies.
    """
    if not config.tied_embeddings or config.pp == 1:
        return False
    has_copy = False
    for chunk in chunks:
        gpt = chunk.module if config.dtype == "fp32" else chunk.module.module
        if gpt.pre_process or gpt.post_process:
            weight = gpt.shared_embedding_or_output_weight().data
            if not gpt.pre_process:
                weight.zero_()
            torch.distributed.all_reduce(weight, group=parallel_state.get_embedding_group())
            has_copy = True
    return has_copy


def build_optimizer(config: Config, chunks: list[Any]) -> Any:
    return get_megatron_optimizer(OptimizerConfig(
        optimizer="adam", lr=config.lr, min_lr=config.lowest_lr, weight_decay=config.weight_decay,
        clip_grad=config.clip_grad, bf16=config.dtype == "bf16", fp16=config.dtype == "fp16",
        initial_loss_scale=config.initial_loss_scale, loss_scale_window=config.loss_scale_window,
        params_dtype=TORCH_DTYPES[config.dtype], use_distributed_optimizer=config.distributed_optimizer,
        overlap_param_gather=config.overlap_param_gather), chunks, use_gloo_process_groups=False)


def build_scheduler(config: Config, optimizer: Any) -> OptimizerParamScheduler:
    """Cosine decay after a linear warm-up; the scheduler counts samples."""
    samples = config.global_batch_size
    return OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=config.lr, min_lr=config.lowest_lr,
        lr_warmup_steps=config.warmup_iterations * samples, lr_decay_steps=config.decay_iterations * samples,
        lr_decay_style="cosine", start_wd=config.weight_decay, end_wd=config.weight_decay,
        wd_incr_steps=config.decay_iterations * samples, wd_incr_style="constant")


def connect(transformer: TransformerConfig, chunks: list[Any], optimizer: Any, config: Config) -> None:
    """Tell the schedules what to call: gradient reduction, loss scaling, and when not to synchronise."""
    transformer.finalize_model_grads_func = finalize_model_grads
    transformer.grad_scale_func = optimizer.scale_loss
    if config.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in chunks]
        transformer.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
    if config.overlap_param_gather and config.vpp > 1:
        transformer.param_sync_func = [chunk.start_param_sync for chunk in chunks]
