"""The steps that all Triton kernels are made of: products with a vector and tanh.

What lies beyond a vector's or a matrix's own size is zero, so that sums need no mask. All arithmetic is that of the
tensors' own dtype: sums of products, not `tl.dot`, so that no TF32 can enter.
"""

import triton
import triton.language as tl


@triton.jit
def times(tile, vector):
    return tl.sum(tile * vector[None, :], axis=1)


@triton.jit
def transposed_times(tile, vector):
    return tl.sum(tile * vector[:, None], axis=0)


@triton.jit
def tanh(x):
    # Near zero the rational function of Cephes, x + x^3 P(x^2)/Q(x^2); elsewhere an exponential. Neither can overflow.
    small = tl.abs(x) < 0.625
    near = tl.where(small, x, 0.0)
    z = near * near
    p = (-9.64399179425052238628e-1 * z - 9.92877231001918586564e1) * z - 1.61468768441708447952e3
    q = ((z + 1.12811678491632931402e2) * z + 2.23548839060100448583e3) * z + 4.84406305325125486048e3
    e = tl.exp(-2.0 * tl.abs(x))
    far = 1.0 - 2.0 * e / (1.0 + e)
    return tl.where(small, near + near * z * p / q, tl.where(x < 0, -far, far))
