"""Wire compression (``wire="fp8"``): what ag_gemm and gemm_rs of bf16, fp16 and fp32 operands share.

Data is quantized to e4m3 with one fp32 scale per row and 128 columns before it is sent, and dequantized on arrival. A
row of K columns takes K + 4 * ceil(K / 128) bytes instead of 2 * K or 4 * K. GEMMs have the dtype of the operands.

    operator    what is quantized                     what is not
    ag_gemm     x, on every rank, its own included    -
    gemm_rs     the partials that are sent            the partial of the rank that adds them

Error. Let x be a sent value and m the largest finite magnitude of its 128 columns. The code is rounded to 4 significant
bits, or to a multiple of 2**-9 if it is less than 2**-6; m has the code 448. So a value arrives with an error of at
most max(2**-4 * |x|, 2**-10 / 448 * m), then rounded to the dtype of x by ag_gemm. The root mean square of the error of
normally distributed values is 2.6 % of theirs. If x is not finite, it arrives as NaN, and the other values of its row
keep their accuracy.
"""

from typing import Any

from tdkernels.ops.common.config import check_config
from tdkernels.ops.common.scaling import is_fp8
from tdkernels.ops.common.validation import check_wire_format, shape_of


def check_wire(operator: str, wire: Any, x: Any, scaling: tuple[Any, ...]) -> None:
    """Raise an error unless ``wire`` is a supported format for x.

    Args:
        operator: The operator, for errors.
        wire: The argument, not None.
        x: The operand.
        scaling: The arguments (scale_x, scale_w, out_dtype, use_fast_accum).

    Raises:
        TypeError: If x is fp8, or an argument for scaled operands is given.
        ValueError: If ``wire`` is not a supported format.
    """
    check_wire_format(operator, "wire", wire)
    if is_fp8(x):
        raise TypeError(f'{operator}: x {shape_of(x)} is {x.dtype}; wire="fp8" is for bfloat16, float16 and float32')
    scale_x, scale_w, out_dtype, use_fast_accum = scaling
    given = {
        "scale_x": scale_x is not None, "scale_w": scale_w is not None, "out_dtype": out_dtype is not None,
        "use_fast_accum": use_fast_accum,
    }
    for name, is_given in given.items():
        if is_given:
            raise TypeError(f'{operator}: {name} is for float8 operands, and wire="fp8" is for other operands')


def check_wire_config(operator: str, config: Any, config_class: type, x: Any) -> None:
    """Raise TypeError or ValueError unless ``config`` is None or a valid config with method "parts"."""
    check_config(operator, config, config_class, x)
    if config is not None and config.method != "parts":
        raise ValueError(
            f'{operator}: with wire="fp8" config must be None or have method "parts", not "{config.method}"'
        )
