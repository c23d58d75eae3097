// Depthwise convolutions of images whose channels lie last. A thread has 16 bytes of channels; sums are in fp32.
// Compiled for one number format (BITS), one size of a kernel (K) and one STRIDE. Loops over the rows of a kernel are not
// unrolled: that takes three times as long to compile.

#if BITS == 32
typedef float Number;
#define LANES 4
#else
typedef unsigned short Number;
#define LANES 8
#endif

#define OUTPUTS 4  // that a thread makes of a row, with the same weights

__device__ __forceinline__ float wide(unsigned short bits) {
#if BITS == 16  // bf16
  return __uint_as_float((unsigned)bits << 16);
#else  // fp16
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
#endif
}

__device__ __forceinline__ unsigned short narrow(float value) {
#if BITS == 16
  unsigned bits = __float_as_uint(value);
  return value != value ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
#else
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
#endif
}

__device__ __forceinline__ void load(const Number* from, float* to) {
#if BITS == 32
  *(float4*)to = *(const float4*)from;
#else
  uint4 four = *(const uint4*)from;
  unsigned pairs[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
  for (int i = 0; i < 4; i++) to[2 * i] = wide(pairs[i] & 0xffff), to[2 * i + 1] = wide(pairs[i] >> 16);
#endif
}

__device__ __forceinline__ void store(const float* from, Number* to) {
#if BITS == 32
  *(float4*)to = *(const float4*)from;
#else
  unsigned pairs[4];
#pragma unroll
  for (int i = 0; i < 4; i++) pairs[i] = narrow(from[2 * i]) | ((unsigned)narrow(from[2 * i + 1]) << 16);
  *(uint4*)to = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
#endif
}

__device__ __forceinline__ void load_floats(const float* from, float* to) {
#pragma unroll
  for (int i = 0; i < LANES; i += 4) *(float4*)(to + i) = *(const float4*)(from + i);
}

// out[n, i, j, c] = start[c] + sum over a, b of x[n, i S + a - pad, j S + b - pad, c] w[a, b, c]
extern "C" __global__ void depthwise_forward(const Number* x, const float* w, const float* start, Number* out, int count,
                                   int height, int width, int channels, int out_height, int out_width, int pad) {
  int groups = channels / LANES, blocks = (out_width + OUTPUTS - 1) / OUTPUTS;
  int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= count) return;
  int c = at % groups * LANES, rest = at / groups;
  int first = rest % blocks * OUTPUTS, row = rest / blocks % out_height, n = rest / blocks / out_height;
  float sums[OUTPUTS][LANES];
#pragma unroll
  for (int r = 0; r < OUTPUTS; r++) load_floats(start + c, sums[r]);
#pragma unroll 1
  for (int a = 0; a < K; a++) {
    int i = row * STRIDE + a - pad;
    if (i < 0 || i >= height) continue;
    float weights[K][LANES];
#pragma unroll
    for (int b = 0; b < K; b++) load_floats(w + (a * K + b) * channels + c, weights[b]);
    const Number* line = x + ((long long)n * height + i) * width * channels + c;
#pragma unroll
    for (int step = 0; step < (OUTPUTS - 1) * STRIDE + K; step++) {
      int j = first * STRIDE + step - pad;
      if (j < 0 || j >= width) continue;
      float values[LANES];
      load(line + (long long)j * channels, values);
#pragma unroll
      for (int r = 0; r < OUTPUTS; r++) {
        int b = step - r * STRIDE;
        if (b < 0 || b >= K) continue;
#pragma unroll
        for (int v = 0; v < LANES; v++) sums[r][v] += values[v] * weights[b][v];
      }
    }
  }
#pragma unroll
  for (int r = 0; r < OUTPUTS; r++)
    if (first + r < out_width)
      store(sums[r], out + (((long long)n * out_height + row) * out_width + first + r) * channels + c);
}

// The gradient of x, one of its pixels a thread: what `depthwise_forward` multiplied it with.
extern "C" __global__ void depthwise_input_gradient(const Number* grad, const float* w, Number* out, int count, int height,
                                          int width, int channels, int out_height, int out_width, int pad) {
  int groups = channels / LANES, at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= count) return;
  int c = at % groups * LANES, pixel = at / groups;
  int j = pixel % width, i = pixel / width % height, n = pixel / width / height;
  float sums[LANES] = {};
#pragma unroll 1
  for (int a = 0; a < K; a++) {
    int row = i + pad - a;
    if (row < 0 || row % STRIDE || row / STRIDE >= out_height) continue;
#pragma unroll
    for (int b = 0; b < K; b++) {
      int column = j + pad - b;
      if (column < 0 || column % STRIDE || column / STRIDE >= out_width) continue;
      float values[LANES], weights[LANES];
      load(grad + (((long long)n * out_height + row / STRIDE) * out_width + column / STRIDE) * channels + c, values);
      load_floats(w + (a * K + b) * channels + c, weights);
#pragma unroll
      for (int v = 0; v < LANES; v++) sums[v] += values[v] * weights[v];
    }
  }
  store(sums, out + (long long)pixel * channels + c);
}

// The gradient of w, in `parts` parts that are still to be added up. A thread has one row of a kernel and goes along
// every so many lines of images; what it needs of x moves through a window.
extern "C" __global__ void depthwise_weight_gradient(const Number* x, const Number* grad, float* out, int parts, int lines,
                                           int height, int width, int channels, int out_height, int out_width,
                                           int pad) {
  int groups = channels / LANES, at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= groups * K * parts) return;
  int c = at % groups * LANES, a = at / groups % K, part = at / groups / K;
  float sums[K][LANES] = {};
  for (int line = part; line < lines; line += parts) {
    int n = line / out_height, i = line % out_height * STRIDE + a - pad;
    if (i < 0 || i >= height) continue;
    const Number* from = x + ((long long)n * height + i) * width * channels + c;
    const Number* grads = grad + (long long)line * out_width * channels + c;
    float window[K][LANES];
#pragma unroll
    for (int b = 0; b < K - STRIDE; b++) {
      int j = b - pad;
      if (j >= 0 && j < width) load(from + (long long)j * channels, window[b]);
      else
#pragma unroll
        for (int v = 0; v < LANES; v++) window[b][v] = 0;
    }
    for (int column = 0; column < out_width; column++) {
#pragma unroll
      for (int b = K - STRIDE; b < K; b++) {
        int j = column * STRIDE + b - pad;
        if (j >= 0 && j < width) load(from + (long long)j * channels, window[b]);
        else
#pragma unroll
          for (int v = 0; v < LANES; v++) window[b][v] = 0;
      }
      float values[LANES];
      load(grads + (long long)column * channels, values);
#pragma unroll
      for (int b = 0; b < K; b++)
#pragma unroll
        for (int v = 0; v < LANES; v++) sums[b][v] += values[v] * window[b][v];
#pragma unroll
      for (int b = 0; b < K - STRIDE; b++)
#pragma unroll
        for (int v = 0; v < LANES; v++) window[b][v] = window[b + STRIDE][v];
    }
  }
#pragma unroll
  for (int b = 0; b < K; b++)
#pragma unroll
    for (int v = 0; v < LANES; v++) out[((long long)part * K * K + a * K + b) * channels + c + v] = sums[b][v];
}
