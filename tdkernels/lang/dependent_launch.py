"""Programmatic dependent launch: a kernel may start before the previous kernel of the stream has ended.

For NVIDIA GPUs of compute capability 9.0 or later. The host passes ``launch_pdl=True`` in the launch of the second
kernel. Without it both functions do nothing.
"""

import triton.language as tl

from tdkernels.lang.kernel import jit


@jit
def launch_dependents():
    """Allow the next kernel to start as soon as all programs of this one have called this or ended.

    Its programs take only resources that are free, so a kernel calls this at its beginning.
    """
    tl.extra.cuda.gdc_launch_dependents()


@jit
def wait_for_prerequisites():
    """Wait until the previous kernel has ended and its stores are visible.

    Results of earlier kernels can be read before this wait if the previous kernel was launched normally, because it
    started after these had ended.
    """
    tl.extra.cuda.gdc_wait()
