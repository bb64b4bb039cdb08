"""The experts in FP8.

`experts` is the two projections with their gradients, `recipe` how operands are cast, `weights` keeps the casts of
weights, `gemm` is the seam to what multiplies, and `cublas` one of those.
"""
