"""Megatron-Core's private names, in this file alone (tried with megatron-core 0.16.1 and 0.19.2).

Everything else in the project uses what Megatron documents. Touched here: bucket groups of the data-parallel wrapper
and their bookkeeping, the optimizers inside a chained optimizer, the state dict of torch's Adam inside them, cached
answers of one-off collectives, the way of a distributed checkpoint to its files, and Megatron's globals when a process
leaves its slot.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

# 0.19 asks once, by an all-reduce, which groups have gradients, and caches the answer in this attribute
NORM_GROUP_CACHE = "_has_grad_norm_group_cache"
ADAM_STATE = {"step", "exp_avg", "exp_avg_sq"}
SCALER_STATES = ({"scale", "growth_tracker", "hysteresis_tracker"}, set())  # of the dynamic and the constant scaler


def bucket_groups(chunk: Any) -> list[Any]:
    """Bucket groups of one model chunk's data-parallel wrapper, in order."""
    return list(chunk.bucket_groups) + list(chunk.expert_parallel_bucket_groups)


def param_buffers(chunk: Any) -> list[torch.Tensor]:
    """The contiguous parameter buffers of a chunk; empty unless the distributed optimizer made them."""
    buffers = list(chunk.buffers) + list(chunk.expert_parallel_buffers)
    return [b.param_data for b in buffers] if all(b.param_data is not None for b in buffers) else []


def outstanding(chunks: list[Any]) -> list[str]:
    """Names of collectives that were started and not waited for; must be empty at a boundary."""
    found = []
    for i, chunk in enumerate(chunks):
        for j, group in enumerate(bucket_groups(chunk)):
            for attribute in ("param_gather_handle", "grad_reduce_handle"):
                if getattr(group, attribute) is not None:
                    found.append(f"chunk {i}, bucket group {j}: {attribute}")
    return found


def get_bookkeeping(chunks: list[Any]) -> list[Any]:
    """Per chunk and bucket group: is it the first batch, how often each parameter's gradient becomes ready, and how
    often it has in this iteration, from which the first batch learns."""
    result = []
    for chunk in chunks:
        names = {p: n for n, p in chunk.named_parameters()}
        result.append([[bool(g.is_first_batch),
                        sorted([names[p], c] for p, c in g.golden_per_param_grad_ready_counts.items()),
                        sorted([names[p], c] for p, c in g.per_param_grad_ready_counts.items())]
                       for g in bucket_groups(chunk)])
    return result


def set_bookkeeping(chunks: list[Any], value: list[Any]) -> None:
    for chunk, rows in zip(chunks, value, strict=True):
        parameters = dict(chunk.named_parameters())
        for group, (first, golden, counts) in zip(bucket_groups(chunk), rows, strict=True):
            group.is_first_batch = first
            group.golden_per_param_grad_ready_counts = {parameters[n]: c for n, c in golden}
            group.per_param_grad_ready_counts = {parameters[n]: c for n, c in counts}


def inner_optimizers(optimizer: Any) -> list[Any]:
    """Megatron's optimizers that hold a torch optimizer each."""
    chained = list(getattr(optimizer, "chained_optimizers", [optimizer]))
    return [o for o in chained if o.optimizer is not None]


def adam_states(optimizer: Any) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
    """(name, main parameter or shard, its Adam state) of every parameter, in the optimizer's order."""
    for i, inner in enumerate(inner_optimizers(optimizer)):
        for j, group in enumerate(inner.optimizer.param_groups):
            for k, parameter in enumerate(group["params"]):
                yield f"{i}.{j}.{k}", parameter, inner.optimizer.state[parameter]


def create_adam_states(optimizer: Any) -> None:
    """Make torch's Adam state now, as its first step would, so that every process of a slot has the same tensors."""
    for inner in inner_optimizers(optimizer):
        assert isinstance(inner.optimizer, (torch.optim.Adam, torch.optim.AdamW)), type(inner.optimizer)
        for group in inner.optimizer.param_groups:
            for parameter in group["params"]:
                if not inner.optimizer.state[parameter]:
                    inner.optimizer.state[parameter] = {
                        "step": torch.zeros((), dtype=torch.float32),
                        "exp_avg": torch.zeros_like(parameter.data), "exp_avg_sq": torch.zeros_like(parameter.data)}


def grad_scalers(optimizer: Any) -> list[Any]:
    """The distinct gradient scalers (fp16)."""
    found = []
    for inner in inner_optimizers(optimizer):
        scaler = getattr(inner, "grad_scaler", None)
        if scaler is not None and all(scaler is not other for other in found):
            found.append(scaler)
    return found


def caches_norm_groups(optimizer: Any) -> bool:
    """Whether this version of Megatron-Core has the cache at all."""
    return hasattr(optimizer, "has_grad_norm_group")


def get_norm_group_cache(optimizer: Any) -> list[dict[str, bool] | None]:
    """The cached answers by group name, None where nothing is cached."""
    return [getattr(o, NORM_GROUP_CACHE, None) for o in [optimizer] + inner_optimizers(optimizer)]


def set_norm_group_cache(optimizer: Any, value: list[dict[str, bool] | None]) -> None:
    for owner, cache in zip([optimizer] + inner_optimizers(optimizer), value, strict=True):
        if cache is not None or hasattr(owner, NORM_GROUP_CACHE):
            setattr(owner, NORM_GROUP_CACHE, None if cache is None else dict(cache))


def param_group_keys(optimizer: Any) -> list[list[set[str]]]:
    """The keys of every parameter group, by inner optimizer."""
    return [[set(group) for group in inner.optimizer.param_groups] for inner in inner_optimizers(optimizer)]


def add_lost_steps(loaded: dict[str, Any]) -> None:
    """In an optimizer's loaded state: the plain optimizers save no step count that is 0, and Adam can't do without."""
    state = loaded.get("optimizer", loaded).get("state")
    if state is not None:
        state.setdefault("common_step", torch.zeros((), dtype=torch.float32))


def undo_load_side_effects(optimizer: Any, keys: list[list[set[str]]]) -> None:
    """After the optimizer's `load_state_dict`: Adam's state in the form that its own steps keep it in.

    The distributed optimizer gives all its parameters one and the same step tensor, which every step would count up
    once per parameter, and leaves the count among the group's values. The counts themselves are set afterwards
    (state.py). `keys`: those of the groups before (`param_group_keys`).
    """
    for inner, groups in zip(inner_optimizers(optimizer), keys, strict=True):
        for group, known in zip(inner.optimizer.param_groups, groups, strict=True):
            for key in set(group) - known:
                del group[key]
            for parameter in group["params"]:
                inner.optimizer.state[parameter]["step"] = torch.zeros((), dtype=torch.float32)


def checkpoint_metadata() -> dict[str, Any]:
    """How the distributed optimizer's shards are laid out in a checkpoint: as they are in its buffers, nothing sent."""
    return {"distrib_optim_sharding_type": "dp_reshardable", "chained_optim_avoid_prefix": True}


def clip_padding(sharded: Any) -> None:
    """In the optimizer's sharded state: let no padding reach beyond the end of its bucket.

    Megatron lets it where the bucket's last parameter doesn't end at a multiple of 64 elements, and torch then refuses
    to save. What is cut is no parameter's.
    """
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    for tensor in nested_values(sharded):
        if isinstance(tensor, ShardedTensor) and len(tensor.global_shape) == 1:
            inside = tensor.global_shape[0] - tensor.global_offset[0]
            if tensor.local_shape[0] > inside:
                tensor.data, tensor.local_shape = tensor.data[:inside], (inside,)


def has_empty_bucket(optimizer: Any) -> bool:
    """Whether this slot's share of some bucket of the distributed optimizer holds no parameter at all."""
    return any(not bucket["param_map"] for inner in inner_optimizers(optimizer) for ranges in
               getattr(inner, "gbuf_ranges", []) for buckets in ranges.values() for bucket in buckets)


def build_save_strategy() -> Any:
    """Megatron's torch_dist format, written by this very process.

    Stock Megatron starts a manager process per save, a fresh Python that imports the main program anew, and forks its
    writers (0.16; threads in 0.19): seconds a save, and processes beside MPI that nobody would end with the run.
    """
    from megatron.core.dist_checkpointing.strategies import torch as torch_dist
    from torch.distributed import checkpoint

    class InProcessStrategy(torch_dist.TorchDistSaveShardedStrategy):
        def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
            flat, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
            checkpoint.save(torch_dist.mcore_to_pyt_state_dict(flat, False),
                            storage_writer=checkpoint.FileSystemWriter(checkpoint_dir),
                            planner=torch_dist.MCoreSavePlanner(flatten_state_dict=False,
                                                                dedup_replicated_tensors=False))

    return InProcessStrategy("torch_dist", 1)


def forget_globals() -> None:
    """Undo initialize_model_parallel, so that this process can take another slot later."""
    from megatron.core import parallel_state
    parallel_state.destroy_model_parallel()


# ---- gradients, at the cut before an optimizer step


def gradient_shards(chunks: list[Any]) -> dict[str, torch.Tensor]:
    """Reduced gradients that this slot's step reads, flat, by bucket: its shard, or all without the distributed
    optimizer."""
    found = {}
    for i, chunk in enumerate(chunks):
        for j, group in enumerate(bucket_groups(chunk)):
            for k, bucket in enumerate(group.buckets):
                data = bucket.grad_data.view(-1)
                if group.ddp_config.use_distributed_optimizer:
                    size = data.numel() // group.intra_distributed_optimizer_instance_size
                    data = data.narrow(0, size * group.intra_distributed_optimizer_instance_rank, size)
                found[f"{i}.{j}.{k}"] = data
    return found


def reduced_buckets(chunks: list[Any]) -> list[str]:
    """Names, as in `gradient_shards`, of buckets whose reduction was started and is done, while the backward runs.

    From any thread; those whose reduction has been waited for already are not among them.
    """
    found = []
    for i, chunk in enumerate(chunks):
        for j, group in enumerate(bucket_groups(chunk)):
            handle = group.grad_reduce_handle
            if handle is not None and handle.works and all(work.is_completed() for work in handle.works):
                found += [f"{i}.{j}.{k}" for k in range(len(group.buckets))]
    return found


def late_ranges(chunks: list[Any]) -> dict[str, list[tuple[int, int]]]:
    """By bucket, element ranges of its shard that Megatron changes after the reduction, in finalize_model_grads.

    Gradients of embeddings, which may be tied over stages, and of layer norms under sequence parallelism.
    """
    shards = gradient_shards(chunks)
    found: dict[str, list[tuple[int, int]]] = {name: [] for name in shards}
    for i, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            if "embedding" in name or "output_layer" in name or getattr(parameter, "sequence_parallel", False):
                gradient = parameter.main_grad
                for bucket, shard in shards.items():
                    first = (gradient.data_ptr() - shard.data_ptr()) // shard.element_size()
                    start, end = max(first, 0), min(first + gradient.numel(), shard.numel())
                    if bucket.startswith(f"{i}.") and start < end:
                        found[bucket].append((start, end))
    return found


def gradient_buffers(chunks: list[Any]) -> list[torch.Tensor]:
    """The whole gradient buffers of all chunks."""
    return [b.grad_data for chunk in chunks for b in list(chunk.buffers) + list(chunk.expert_parallel_buffers)]


def attach_gradients(optimizer: Any) -> None:
    """Let each main parameter's `grad` be what the next step reads, as the step itself does first. Copies nothing
    where gradients are reduced in fp32."""
    for inner in inner_optimizers(optimizer):
        if hasattr(inner, "_copy_model_grads_to_main_grads"):
            inner._copy_model_grads_to_main_grads()
        else:
            for group in inner.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = parameter.main_grad


def step_inner(optimizer: Any) -> None:
    """The bare Adam step, of parameters that have a `grad`: same kernels as in Megatron's step, no collectives."""
    for inner in inner_optimizers(optimizer):
        inner.optimizer.step()


def step_alone(optimizer: Any, clip_grad: float, grad_norm: float, stepped: bool) -> None:
    """Megatron's step with a norm that others have found: what it changes is what the bare step changes. Groups must be
    isolated; parameters of the model aren't updated."""
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
    for inner in inner_optimizers(optimizer):
        inner.prepare_grads()
        if stepped and clip_grad > 0.0:
            clip_grad_by_total_norm_fp32(inner.get_parameters(), max_norm=clip_grad, total_norm=grad_norm)
    if stepped:
        step_inner(optimizer)


def prepare_for_step(chunks: list[Any]) -> None:
    """What the end of the reduction leaves behind in the bookkeeping of a chunk's buckets."""
    for chunk in chunks:
        for group in bucket_groups(chunk):
            group.param_gather_dispatched = False

