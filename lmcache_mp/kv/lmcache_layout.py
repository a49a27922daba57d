"""How KV lies in the objects of an LMCache server, and ``[planes, layers, T, width]`` made of it.

An object holds one chunk: ``[2, layers, chunk, width]``, or ``[layers, chunk, width]`` where there
is one plane. vLLM's CPU build packs K and V of a block of a head into one plane of twice the width:
first K as ``[head_dim, block]``, then V as ``[block, head_dim]`` (its vector kernels; those for AMX
lay K out in another way, which is refused).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lmcache_mp.errors import KVError
from lmcache_mp.kv.lmcache_server import Registration
from lmcache_mp.kv.model_config import ModelConfig, read_model_config

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Packing:
    """K and V of a block in one plane: the heads and tokens that it is made of."""

    kv_heads: int
    head_dim: int
    block_size: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The KV of one model: ``[planes, layers, T, width]`` of ``dtype``, and how it is packed."""

    planes: int
    layers: int
    width: int
    dtype: torch.dtype
    packing: Packing | None

    @property
    def object_planes(self) -> int:
        """Planes of an object on the server."""
        return 1 if self.packing else self.planes

    @property
    def object_width(self) -> int:
        """Numbers of a token in a layer and plane of an object."""
        return 2 * self.width if self.packing else self.width

    def unpack(self, objects: Sequence[Tensor]) -> Tensor:
        """The KV of consecutive chunks, a private tensor [planes, layers, T, width]."""
        chunk = objects[0].shape[-2]
        shape = (self.planes, self.layers, chunk * len(objects), self.width)
        kv = torch.empty(shape, dtype=self.dtype)
        for index, stored in enumerate(objects):
            part = kv[:, :, index * chunk : (index + 1) * chunk]
            if self.packing:
                _unpack_fused(stored, part, self.packing)
            else:
                part.copy_(stored.view(part.shape))
        return kv

    def pack(self, kv: Tensor, into: Tensor) -> None:
        """Write the KV of one chunk [planes, layers, chunk, width] into an object."""
        if self.packing:
            _pack_fused(kv, into, self.packing)
        else:
            into.copy_(kv.view(into.shape))

    def new_object(self, chunk: int) -> Tensor:
        """Room for one chunk, where there is no shared memory to write to."""
        shape = (self.layers, chunk, self.object_width)
        return torch.empty(
            shape if self.object_planes == 1 else (self.planes, *shape), dtype=self.dtype
        )


def _fused_blocks(stored: Tensor, packing: Packing) -> Tensor:
    """A view of an object [layers, T, heads * 2 * head_dim] by block, head and half."""
    heads, size, width = packing.kv_heads, packing.block_size, packing.head_dim
    layers = stored.shape[0]
    return stored.view(layers, -1, size, heads, 2 * width).permute(0, 1, 3, 2, 4)


def _unpack_fused(stored: Tensor, kv: Tensor, packing: Packing) -> None:
    heads, size, width = packing.kv_heads, packing.block_size, packing.head_dim
    layers = stored.shape[0]
    halves = _fused_blocks(stored, packing).reshape(layers, -1, heads, 2, size * width)
    blocks = halves.shape[1]
    shape = (layers, blocks, size, heads, width)
    keys = halves[:, :, :, 0].view(layers, blocks, heads, width, size).permute(0, 1, 4, 2, 3)
    values = halves[:, :, :, 1].view(layers, blocks, heads, size, width).permute(0, 1, 3, 2, 4)
    kv[0].view(shape).copy_(keys)
    kv[1].view(shape).copy_(values)


def _pack_fused(kv: Tensor, into: Tensor, packing: Packing) -> None:
    heads, size, width = packing.kv_heads, packing.block_size, packing.head_dim
    layers = into.shape[0]
    parts = kv.reshape(2, layers, -1, size, heads, width)
    blocks = parts.shape[2]
    halves = kv.new_empty(layers, blocks, heads, 2, size * width)
    keys = halves[:, :, :, 0].view(layers, blocks, heads, width, size)
    keys.copy_(parts[0].permute(0, 1, 3, 4, 2))
    values = halves[:, :, :, 1].view(layers, blocks, heads, size, width)
    values.copy_(parts[1].permute(0, 1, 3, 2, 4))
    _fused_blocks(into, packing).copy_(halves.view(layers, blocks, heads, size, 2 * width))


def published_layout(registration: Registration) -> Layout | None:
    """The layout that the server publishes for a model, if it does."""
    found = registration.layout
    if found is None:
        return None
    dtype = getattr(torch, found.dtype)
    packing = None
    if found.fused:
        packing = _packing(registration, _config(registration), dtype)
    return Layout(found.planes, found.layers, found.width, dtype, packing)


def layout_of_object(registration: Registration, stored: Tensor) -> Layout:
    """The layout of a model whose server publishes none, from one of its objects."""
    if stored.ndim == 4:
        planes, layers, _, width = stored.shape
        return Layout(planes, layers, width, stored.dtype, None)
    config = _config(registration)
    layers, _, width = stored.shape
    return _single_plane(registration, config, layers, width, stored.dtype)


def layout_of_kv(registration: Registration, kv: Tensor) -> Layout:
    """The layout of a model whose server publishes none, from KV [planes, layers, T, width]."""
    planes, layers, _, width = kv.shape
    if planes == 1 or not registration.single_plane:
        return Layout(planes, layers, width, kv.dtype, None)
    return _single_plane(registration, _config(registration), layers, 2 * width, kv.dtype)


def _single_plane(
    registration: Registration, config: ModelConfig, layers: int, width: int, dtype: torch.dtype
) -> Layout:
    if config.latent:
        return Layout(1, layers, width, dtype, None)
    packing = _packing(registration, config, dtype)
    half = packing.kv_heads * packing.head_dim
    if (layers, width) != (config.layers, 2 * half):
        raise KVError(
            f"the KV of {registration.model_name!r} has {layers} layers of {width} numbers a "
            f"token; its config.json makes it {config.layers} of {2 * half}"
        )
    return Layout(2, layers, half, dtype, packing)


def _packing(registration: Registration, config: ModelConfig, dtype: torch.dtype) -> Packing:
    if dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        raise KVError(
            "vLLM's CPU build packs bfloat16 keys for AMX on this processor, in a layout that is "
            "not known here: start vLLM with --dtype float32"
        )
    if not registration.block_size:
        raise KVError(f"the server does not tell the block size of {registration.model_name!r}")
    return Packing(config.kv_heads, config.head_dim, registration.block_size)


def _config(registration: Registration) -> ModelConfig:
    config = read_model_config(registration.model_name)
    if config is None:
        raise KVError(
            f"the server keeps K and V of {registration.model_name!r} in one plane, which only the "
            "model's config.json tells apart, and it is not on this machine"
        )
    return config
