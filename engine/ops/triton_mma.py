"""What Triton has no words for: a warp's product on a tensor core from registers, and bytes picked out of registers.

Tensors are [32 * warps]: one element a thread, in the order of threads, which is the layout that Triton gives such
tensors; kernels that use this are tried against the reference before they serve. Needs compute capability 8.0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.ops.triton_attention import INTERPRETED

inlined = (lambda function: function) if INTERPRETED else triton.jit
"""Of functions that kernels call: the interpreter would spend a millisecond on each call of a decorated one."""

if INTERPRETED:
    from engine.ops.emulated import bytes_of, mma
else:

    @triton.jit
    def mma(a0, a1, a2, a3, b0, b1, c, MANTISSA: tl.constexpr):
        """A B + C of each warp, in PTX's fragments of m16n8k16; A and B are pairs of bfloat16 or float16."""
        TYPES: tl.constexpr = "bf16.bf16" if MANTISSA == 7 else "f16.f16"
        return tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k16.row.col.f32." + TYPES + ".f32 "
            "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            [a0, a1, a2, a3, b0, b1, c[0], c[1], c[2], c[3]],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )

    @triton.jit
    def bytes_of(low, high, select):
        """PTX's prmt: four of the eight bytes of two int32, by the lowest three bits of four nibbles."""
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, select], dtype=tl.int32, is_pure=True, pack=1
        )


@inlined
def columns(words):
    """[thread, n] -> n tensors [thread]."""
    if words.shape[1] == 1:
        found = (tl.reshape(words, [words.shape[0]]),)
    elif words.shape[1] == 2:
        found = tl.split(words)
    else:
        even, odd = tl.split(tl.reshape(words, [words.shape[0], 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        found = (first, second, third, fourth)
    return found


@inlined
def in_order():
    """Loads before it are sent before those after it: else the assembler puts them off to where they are needed."""
    if not INTERPRETED:
        tl.inline_asm_elementwise("bar.warp.sync 0xffffffff; // $0", "=r", [], tl.int32, is_pure=False, pack=1)
