"""Layer norm with Kernel Tuner: a CUDA kernel in a string, tuned ahead of time, and then compiled and launched by hand."""

import cupy
import kernel_tuner
import numpy
import torch

SOURCE = """
#include <cuda_fp16.h>
extern "C" __global__ void layer_norm(
    const __half* x, const __half* w, const __half* b, __half* out, int columns, float eps
) {
    __shared__ float partial[2][block_size_x / 32];
    const __half* row = x + (long long)blockIdx.x * columns;
    float sum = 0, squares = 0;
    for (int i = threadIdx.x; i < columns; i += block_size_x) {
        float value = __half2float(row[i]);
        sum += value;
        squares += value * value;
    }
    for (int offset = 16; offset; offset /= 2) {
        sum += __shfl_down_sync(~0u, sum, offset);
        squares += __shfl_down_sync(~0u, squares, offset);
    }
    if (threadIdx.x % 32 == 0) {
        partial[0][threadIdx.x / 32] = sum;
        partial[1][threadIdx.x / 32] = squares;
    }
    __syncthreads();
    sum = squares = 0;
    for (int i = 0; i < block_size_x / 32; i++) {
        sum += partial[0][i];
        squares += partial[1][i];
    }
    float mean = sum / columns, scale = rsqrtf(squares / columns - mean * mean + eps);
    for (int i = threadIdx.x; i < columns; i += block_size_x)
        out[(long long)blockIdx.x * columns + i] =
            __float2half((__half2float(row[i]) - mean) * scale * __half2float(w[i]) + __half2float(b[i]));
}
"""


def tune(rows, columns, eps=1e-5):
    rng = numpy.random.default_rng(0)
    x, w, b = (rng.standard_normal(shape).astype(numpy.float16) for shape in ((rows, columns), columns, columns))
    centred = x - x.astype(numpy.float32).mean(1, keepdims=True)
    right = centred / numpy.sqrt((centred * centred).mean(1, keepdims=True) + eps) * w + b
    arguments = [x, w, b, numpy.empty_like(x), numpy.int32(columns), numpy.float32(eps)]
    answer = [None, None, None, right.astype(numpy.float16), None, None]
    results, _ = kernel_tuner.tune_kernel(
        "layer_norm",
        SOURCE,
        rows,
        arguments,
        {"block_size_x": [64, 128, 256, 512, 1024]},
        grid_div_x=[],
        answer=answer,
        atol=1e-2,
        lang="cupy",
        cache=f"layer_norm_{rows}_{columns}.json",
    )
    return min(results, key=lambda result: result["time"])["block_size_x"]


tuned = {}


def layer_norm(x, w, b, eps=1e-5):
    rows, columns = x.shape
    out = torch.empty_like(x)
    if (rows, columns) not in tuned:
        block = tune(rows, columns, eps)
        tuned[rows, columns] = block, cupy.RawKernel(f"#define block_size_x {block}\n{SOURCE}", "layer_norm")
    block, kernel = tuned[rows, columns]
    arguments = [cupy.from_dlpack(each.detach()) for each in (x, w, b, out)]
    with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        kernel((rows,), (block,), (*arguments, numpy.int32(columns), numpy.float32(eps)))
    return out


if __name__ == "__main__":
    from harness import check

    check(layer_norm)
