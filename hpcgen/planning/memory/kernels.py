"""Buffers that libraries allocate once and keep. They are part of torch.cuda.max_memory_allocated."""

from __future__ import annotations

from collections.abc import Iterator

from hpcgen.planning.setup import Setup, once_per_setup
from trainer.contract.attention import attention_of

CUBLAS_WORKSPACE_BYTES = 32 * 2**20
"""Workspace of cuBLAS on Hopper and later. Sources: Transformer Engine's cpp_extensions/gemm.py,
get_cublas_workspace_size_bytes; torch's aten/src/ATen/cuda/CublasHandlePool.cpp. Before Hopper it is 4 or 8 MiB."""

GROUPED_STREAMS = 4
"""Streams of Transformer Engine's grouped product, with a workspace each (its common/util/multi_stream.cpp)."""


def kernel_bytes(setup: Setup, *, kinds: set[bool], has_output_layer: bool) -> int:
    """Buffers on a stage with dense layers (False in `kinds`) or layers with experts (True).

    torch computes the output layer, and all products if Transformer Engine does not. Its threads for the forward and
    the backward pass have a workspace each. With sequence parallelism, these products share one buffer for their
    gathered input (megatron/core/tensor_parallel/layers.py, get_global_memory_buffer).
    """
    workspaces, size = 0, 0
    if has_output_layer or not setup.uses_engine:
        workspaces += 2
        size += setup.tokens * setup.gathered_hidden_bytes
    if setup.uses_engine:
        workspaces += 1 + (GROUPED_STREAMS if True in kinds and setup.groups_experts else 0)
        if setup.accumulates_in_products and setup.trains_weights:
            shapes = set[tuple[int, int]]().union(*(_weight_shapes(setup)[kind] for kind in kinds))
            size += sum(setup.value_bytes * rows * columns for rows, columns in shapes)
    return size + workspaces * CUBLAS_WORKSPACE_BYTES


@once_per_setup
def _weight_shapes(setup: Setup) -> dict[bool, set[tuple[int, int]]]:
    """Shapes of the weights of Transformer Engine's products on a device, in dense layers (False) and in layers with
    experts (True).

    Once a product has added its gradient to the fp32 buffer, it returns an empty tensor to autograd. There is one such
    tensor for each shape, and it is never released (its pytorch/module/base.py, get_dummy_wgrad).
    """
    model, tensor = setup.model, setup.layout.tensor_model_parallel_size
    attention = {product.shape(tensor) for product in attention_of(model).projections(model)}
    assert model.ffn_hidden_size
    shapes = {False: attention.union(_mlp_shapes(setup, model.ffn_hidden_size // tensor))}
    if model.num_moe_experts is not None:
        assert model.moe_ffn_hidden_size
        ranks = setup.layout.expert_tensor_parallel_size
        shapes[True] = attention.union(_mlp_shapes(setup, model.moe_ffn_hidden_size // ranks))
        if model.moe_shared_expert_intermediate_size is not None:
            shapes[True].update(_mlp_shapes(setup, model.moe_shared_expert_intermediate_size // tensor))
    return shapes


def _mlp_shapes(setup: Setup, width: int) -> Iterator[tuple[int, int]]:
    hidden = setup.model.hidden_size
    yield width * (2 if setup.model.swiglu else 1), hidden
    yield hidden, width
