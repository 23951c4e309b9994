"""From tensors by name to a decoder's fused weights, one tensor at a time.

Everything is checked against the table before a byte is copied: what is missing, what is left over, what has another
shape. Then each fused matrix is made once in its final dtype and place and filled part by part, so that the peak is
the model plus its largest tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from engine.errors import ModelError
from engine.model.config import ModelConfig
from engine.model.packing import Packing
from engine.model.transformer import LayerWeights, Weights
from engine.ops.linear import Matrix
from engine.ops.packed import Mixed, Packed, pack_blocks, stack
from engine.weights.names import layer_names
from engine.weights.source import WeightSource

Shapes = dict[str, tuple[int, ...]]
Reorder = Callable[[str, Tensor], Tensor]
"""(part, tensor) -> its rows in the order in which a Hugging Face file holds them."""


def as_it_is(part: str, tensor: Tensor) -> Tensor:
    """For a format that already has that order."""
    return tensor


@dataclass(frozen=True)
class Layout:
    """How one file format names things: top parts, layer parts, ends of names to ignore, and the order of rows."""

    top: dict[str, str]
    layer: dict[str, str]
    derived: tuple[str, ...]
    reorder: Reorder = as_it_is
    norm_offset: float = 0.0  # a norm's weight is what the file holds and this
    ignored: tuple[str, ...] = ()  # starts of names of what the model doesn't need


def top_shapes(config: ModelConfig) -> Shapes:
    """The parts outside the layers that this config has."""
    shapes = {"embed": (config.vocab, config.hidden), "norm": (config.hidden,)}
    return shapes if config.tied else {**shapes, "head": (config.vocab, config.hidden)}


def layer_shapes(config: ModelConfig) -> Shapes:
    """The parts of one layer that this config has."""
    hidden, ffn = config.hidden, config.ffn
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: Shapes = {
        "attention_norm": (hidden,),
        "q": (q, hidden),
        "k": (kv, hidden),
        "v": (kv, hidden),
        "o": (hidden, q),
        "mlp_norm": (hidden,),
        "gate": (ffn, hidden),
        "up": (ffn, hidden),
        "down": (hidden, ffn),
    }
    if config.attention_bias:
        shapes.update(q_bias=(q,), k_bias=(kv,), v_bias=(kv,))
    if config.output_bias:
        shapes.update(o_bias=(hidden,))
    if config.qk_norm:
        shapes.update(q_norm=(config.head_dim,), k_norm=(config.head_dim,))
    if config.sandwich:
        shapes.update(attention_out_norm=(hidden,), mlp_out_norm=(hidden,))
    if config.mlp_bias:
        shapes.update(gate_bias=(ffn,), up_bias=(ffn,), down_bias=(hidden,))
    return shapes


def assemble(config: ModelConfig, source: WeightSource, layout: Layout, packing: Packing) -> Weights:
    """Check the table, then load. Raises ModelError naming the tensor and its file."""
    check_table(config, source, layout)

    def load(names: dict[str, str], *parts: str) -> Tensor:
        """The parts, stacked by rows, in one fresh tensor."""
        shapes = [source.shapes[names[name]] for name in parts]
        rows = sum(shape[0] for shape in shapes)
        whole = torch.empty((rows, *shapes[0][1:]), dtype=packing.dtype, device=packing.device)
        for piece, name in zip(whole.split([shape[0] for shape in shapes]), parts, strict=True):
            for row, block in source.blocks(names[name]):
                piece[row : row + len(block)] = block
            ordered = layout.reorder(name, piece)
            if ordered is not piece:
                piece.copy_(ordered)
        return whole

    def packed(names: dict[str, str], part: str, multiply: bool) -> Packed:
        kind = packing.kind(source, names[part])
        raw = layout.reorder(part, source.raw(names[part]))
        return pack_blocks(raw, kind, packing.dtype, packing.device, packing.kernels[kind.name], multiply=multiply)

    def matrix(names: dict[str, str], *parts: str, multiply: bool = True) -> Matrix:
        """The parts, stacked by rows: neighbours of one form are one piece."""
        pieces: list[Tensor | Packed] = []
        for kind, group in groupby(parts, lambda part: packing.kind(source, names[part])):
            if kind is None:
                pieces.append(load(names, *group))
                continue
            found = [packed(names, part, multiply) for part in group]
            pieces += [stack(list(same)) for _, same in groupby(found, lambda piece: piece.four is None)]
        return pieces[0] if len(pieces) == 1 else Mixed(tuple(pieces))

    def norm(names: dict[str, str], part: str, present: bool = True) -> Tensor | None:
        """In the model's dtype, or in float32 where the model's norms are."""
        if not present:
            return None
        whole = torch.cat([block for _, block in source.blocks(names[part])])
        return (whole.float() + layout.norm_offset).to(
            packing.device, torch.float32 if config.sandwich else packing.dtype
        )

    def maybe(present: bool, names: dict[str, str], *parts: str) -> Tensor | None:
        return load(names, *parts) if present else None

    layers = []
    for index in range(config.layers):
        names = layer_names(layout.layer, index)
        layers.append(
            LayerWeights(
                attention_norm=norm(names, "attention_norm"),
                qkv=matrix(names, "q", "k", "v"),
                o=matrix(names, "o"),
                mlp_norm=norm(names, "mlp_norm"),
                gate_up=matrix(names, "gate", "up"),
                down=matrix(names, "down"),
                qkv_bias=maybe(config.attention_bias, names, "q_bias", "k_bias", "v_bias"),
                o_bias=maybe(config.output_bias, names, "o_bias"),
                q_norm=norm(names, "q_norm", config.qk_norm),
                k_norm=norm(names, "k_norm", config.qk_norm),
                attention_out_norm=norm(names, "attention_out_norm", config.sandwich),
                mlp_out_norm=norm(names, "mlp_out_norm", config.sandwich),
                gate_up_bias=maybe(config.mlp_bias, names, "gate_bias", "up_bias"),
                down_bias=maybe(config.mlp_bias, names, "down_bias"),
            )
        )
    alone = config.tied and layout.top["head"] not in source.shapes
    embed = head = matrix(layout.top, "embed", multiply=alone)
    if not alone:
        head = matrix(layout.top, "head")
        if config.tied and _equal(head, embed):  # a file may hold the embedding twice, and transformers unties
            embed = head  # those whose copies differ
    return Weights(embed=embed, layers=tuple(layers), norm=norm(layout.top, "norm"), head=head)


def _equal(one: Tensor | Packed, other: Tensor | Packed) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    rows = one.slices()
    return one.kind is other.kind and all(torch.equal(one.dequantise(some), other.dequantise(some)) for some in rows)


def check_table(config: ModelConfig, source: WeightSource, layout: Layout) -> None:
    """Every part is there with its shape, and nothing else is; ModelError naming what isn't."""
    expected = {layout.top[part]: shape for part, shape in top_shapes(config).items()}
    for index in range(config.layers):
        names = layer_names(layout.layer, index)
        expected.update({names[part]: shape for part, shape in layer_shapes(config).items()})
    if layout.top["head"] in source.shapes:
        expected[layout.top["head"]] = (config.vocab, config.hidden)  # even of a tied model
    missing = [name for name in expected if name not in source.shapes]
    if missing:
        raise ModelError(
            f"{len(missing)} tensors are missing, the first is {_few(missing)}",
            "the file is incomplete or its config is of another model: download both again",
        )
    for name, shape in expected.items():
        if source.shapes[name] != shape:
            raise ModelError(
                f"tensor '{name}' in {source.where(name)} has shape {list(source.shapes[name])}, "
                f"the config needs {list(shape)}",
                "the weights and the config are of different models: download both again",
            )
    left = [
        name
        for name in source.shapes
        if name not in expected and not name.endswith(layout.derived) and not name.startswith(layout.ignored)
    ]
    if left:
        raise ModelError(
            f"{len(left)} tensors of the file have no place in a {config.family} model, the first is {_few(left)}",
            "the model has parts that this engine doesn't compute, or its config is of another model",
        )


def _few(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names[:3]) + (" ..." if len(names) > 3 else "")
