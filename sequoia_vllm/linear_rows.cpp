// Linear layers of bfloat16 weights for any number of rows, summed in float32: y = x W^T + b.
//
// For CPUs that have AVX-512 and not its bfloat16 instructions. There vLLM's library takes four
// times as long for six rows as for one. Weights are read once for all rows, and widened in
// registers. A row's sums are the same whatever other rows there are.
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t LANES = 16;
constexpr int OUTPUTS = 4;  // 6 x 4 vectors of sums stay in registers (AVX-512 has 32)
constexpr int64_t ROWS = 6;
// Columns at once of up to six rows, which then stay in the core's cache.
constexpr int64_t BLOCK = 16384;
typedef float Floats __attribute__((vector_size(LANES * 4), aligned(4)));
typedef float Eight __attribute__((vector_size(32)));
typedef float Four __attribute__((vector_size(16)));
typedef float Two __attribute__((vector_size(8)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2), aligned(2)));

Floats widened(const uint16_t* from) {
  const Halves raw = *reinterpret_cast<const Halves*>(from);
  return reinterpret_cast<Floats>(__builtin_convertvector(raw, Ints) << 16);
}

float widened_one(uint16_t from) {
  const uint32_t bits = uint32_t(from) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

uint16_t narrowed(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if (value != value) return bits >> 16 | 0x40;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to the nearest, ties to even
}

template <typename Half, typename Whole>
Half halved(const Whole& whole) {
  Half halves[2];
  std::memcpy(halves, &whole, sizeof whole);
  return halves[0] + halves[1];
}

float total(const Floats& values) {
  return halved<float>(halved<Two>(halved<Four>(halved<Eight>(values))));
}

// M rows of x times OUTPUTS rows of W, in the columns from first to end. Until the last of them
// the sums are kept.
template <int M>
void multiply(const float* x, const uint16_t* w, const uint16_t* b, uint16_t* y, int64_t inner,
              int64_t stride, int64_t first, int64_t end, float* kept) {
  Floats sums[M][OUTPUTS] = {};
  if (first > 0) std::memcpy(sums, kept, sizeof sums);
  for (int64_t k = first; k < end; k += LANES) {
    Floats weights[OUTPUTS];
    for (int n = 0; n < OUTPUTS; n++) {
      weights[n] = widened(w + n * inner + k);
      __builtin_prefetch(w + (OUTPUTS + n) * inner + k);  // for the next call
    }
    for (int m = 0; m < M; m++) {
      const Floats row = *reinterpret_cast<const Floats*>(x + m * inner + k);
      for (int n = 0; n < OUTPUTS; n++) sums[m][n] += row * weights[n];
    }
  }
  if (end < inner) {
    std::memcpy(kept, sums, sizeof sums);
    return;
  }
  for (int m = 0; m < M; m++)
    for (int n = 0; n < OUTPUTS; n++) {
      const float sum = total(sums[m][n]);
      y[m * stride + n] = narrowed(b ? sum + widened_one(b[n]) : sum);
    }
}

}  // namespace

extern "C" void sequoia_linear_rows(const uint16_t* x, const uint16_t* w, const uint16_t* b,
                                    uint16_t* y, int64_t rows, int64_t outputs, int64_t inner,
                                    int64_t threads) {
  std::vector<float> wide(rows * inner);
  for (int64_t i = 0; i < rows * inner; i++) wide[i] = widened_one(x[i]);
  const int64_t block = rows > ROWS || inner < BLOCK ? inner : BLOCK;
  std::vector<float> sums(block < inner ? ROWS * outputs * LANES : 0);
  for (int64_t k = 0; k < inner; k += block) {
    const int64_t end = k + block < inner ? k + block : inner;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t n = 0; n < outputs; n += OUTPUTS) {
      const uint16_t *weights = w + n * inner, *bias = b ? b + n : nullptr;
      float* kept = block < inner ? sums.data() + ROWS * n * LANES : nullptr;
      for (int64_t m = 0; m < rows; m += ROWS) {
        const float* from = wide.data() + m * inner;
        uint16_t* to = y + m * outputs + n;
        switch (rows - m) {
          case 1: multiply<1>(from, weights, bias, to, inner, outputs, k, end, kept); break;
          case 2: multiply<2>(from, weights, bias, to, inner, outputs, k, end, kept); break;
          case 3: multiply<3>(from, weights, bias, to, inner, outputs, k, end, kept); break;
          case 4: multiply<4>(from, weights, bias, to, inner, outputs, k, end, kept); break;
          case 5: multiply<5>(from, weights, bias, to, inner, outputs, k, end, kept); break;
          default: multiply<ROWS>(from, weights, bias, to, inner, outputs, k, end, kept);
        }
      }
    }
  }
}
