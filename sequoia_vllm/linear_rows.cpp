// Linear layers of bfloat16 or float32 weights for any number of rows, summed in float32:
// y = x W^T + b.
//
// For CPUs without bfloat16 instructions, with AVX-512 or with AVX2 alone. There vLLM's library
// takes four times as long for six rows as for one. Weights are read once for all rows, and widened
// in registers. A row's sums are the same whatever other rows there are.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

#ifdef __AVX512F__
constexpr int64_t LANES = 16;
#else
constexpr int64_t LANES = 8;
#endif
constexpr int OUTPUTS = 4;
constexpr int64_t ROWS = 6;
// Outputs of each piece of work.
constexpr int64_t PIECE = 32;
// Columns at once, of which up to six rows stay in the core's cache.
constexpr int64_t BLOCK = 16384;
// Bytes of weights that the core's first cache takes ahead.
constexpr int64_t NEAR = 4096;
typedef float Floats __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(LANES * 4), aligned(2), may_alias));
typedef float Eight __attribute__((vector_size(32)));
typedef float Four __attribute__((vector_size(16)));
typedef float Two __attribute__((vector_size(8)));
struct alignas(64) Line {
  float values[16];
};

// Half of the next 2 x LANES values. Halves of bfloat16 are values at even and at odd places, which
// take one instruction each to widen.
inline Floats half_of(const uint16_t* from, int half) {
  const Ints pairs = *reinterpret_cast<const Ints*>(from);
  return reinterpret_cast<Floats>(half ? pairs & -0x10000 : pairs << 16);
}
inline Floats half_of(const float* from, int half) {
  return *reinterpret_cast<const Floats*>(from + half * LANES);
}

inline float widened(uint16_t from) {
  const uint32_t bits = uint32_t(from) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline float widened(float from) { return from; }

inline void narrow(float value, uint16_t& to) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  // To the nearest, ties to even.
  to = value != value ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline void narrow(float value, float& to) { to = value; }

template <typename Half, typename Whole>
inline Half halved(const Whole& whole) {
  Half halves[2];
  std::memcpy(halves, &whole, sizeof whole);
  return halves[0] + halves[1];
}

inline float total(const Floats& values) {
#ifdef __AVX512F__
  return halved<float>(halved<Two>(halved<Four>(halved<Eight>(values))));
#else
  return halved<float>(halved<Two>(halved<Four>(values)));
#endif
}

// Keeps a value in a register: compilers load it anew wherever it is used, as an operand.
inline void in_register(Floats& value) {
#ifdef __x86_64__
  asm("" : "+v"(value));
#endif
}

// M rows of x times N rows of W, in the columns from first to end. Until the last of them the sums
// are kept.
template <int M, int N, typename T>
void multiply(const float* x, const T* w, float* y, int64_t inner, int64_t stride, int64_t first,
              int64_t end, Floats* kept) {
  Floats sums[M][N];
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) sums[m][n] = first > 0 ? kept[m * N + n] : Floats{};
  // Weights of a later call, fetched in the order in which they lie in memory.
  const T* later = w + OUTPUTS * inner;
  const bool whole = end - first == inner, near = OUTPUTS * inner * sizeof(T) <= NEAR;
  const int64_t across = whole ? 2 * LANES : inner, along = whole ? N : 1;
  for (int64_t k = first; k < end; k += 2 * LANES) {
    for (int n = 0; n < N; n++) {
      const T* place = later + n * across + k * along;
      near ? __builtin_prefetch(place) : __builtin_prefetch(place, 0, 2);
    }
    for (int half = 0; half < 2; half++) {
      Floats weights[N];
      for (int n = 0; n < N; n++) in_register(weights[n] = half_of(w + n * inner + k, half));
      for (int m = 0; m < M; m++) {
        Floats row = half_of(x + m * inner + k, half);
        in_register(row);
        for (int n = 0; n < N; n++) sums[m][n] += row * weights[n];
      }
    }
  }
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++)
      if (end < inner)
        kept[m * N + n] = sums[m][n];
      else
        y[m * stride + n] = total(sums[m][n]);
}

template <int M, typename T>
void multiply_outputs(const float* x, const T* w, float* y, int64_t inner, int64_t stride,
                      int64_t first, int64_t end, Floats* kept) {
  // So many sums stay in registers: AVX-512 has 32, AVX2 16.
  constexpr int N = LANES == 16 || M < 3 ? OUTPUTS : 2;
  for (int n = 0; n < OUTPUTS; n += N)
    multiply<M, N>(x, w + n * inner, y + n, inner, stride, first, end, kept + M * n);
}

template <typename T>
void linear(const float* x, const T* w, const T* b, T* y, int64_t rows, int64_t outputs,
            int64_t inner, int64_t threads) {
  constexpr decltype(&multiply_outputs<1, T>) by_rows[ROWS] = {
      multiply_outputs<1, T>, multiply_outputs<2, T>, multiply_outputs<3, T>,
      multiply_outputs<4, T>, multiply_outputs<5, T>, multiply_outputs<6, T>};
  const int64_t block = rows > ROWS || inner < BLOCK ? inner : BLOCK;
  const int64_t groups = outputs / OUTPUTS;
  const int64_t pieces = (outputs + PIECE * threads - 1) / (PIECE * threads) * threads;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t piece = 0; piece < pieces; piece++) {
    const int64_t begin = groups * piece / pieces * OUTPUTS;
    const int64_t size = groups * (piece + 1) / pieces * OUTPUTS - begin;
    std::vector<float> sums(rows * size);
    std::vector<Line> kept(block < inner ? rows * size : 0);
    for (int64_t k = 0; k < inner; k += block)
      for (int64_t n = 0; n < size; n += OUTPUTS)
        for (int64_t m = 0; m < rows; m += ROWS)
          by_rows[std::min(rows - m, ROWS) - 1](
              x + m * inner, w + (begin + n) * inner, sums.data() + m * size + n, inner, size, k,
              std::min(k + block, inner),
              reinterpret_cast<Floats*>(kept.data()) + rows * n + m * OUTPUTS);
    for (int64_t m = 0; m < rows; m++)
      for (int64_t n = 0; n < size; n++) {
        const float sum = sums[m * size + n];
        narrow(b ? sum + widened(b[begin + n]) : sum, y[m * outputs + begin + n]);
      }
  }
}

}  // namespace

extern "C" const int64_t sequoia_lanes = LANES;

extern "C" void sequoia_linear_rows_bfloat16(const uint16_t* x, const uint16_t* w,
                                             const uint16_t* b, uint16_t* y, int64_t rows,
                                             int64_t outputs, int64_t inner, int64_t threads) {
  std::vector<Line> lines(rows * inner / 16);
  float* wide = reinterpret_cast<float*>(lines.data());
  for (int64_t k = 0; k < rows * inner; k += 2 * LANES)
    for (int half = 0; half < 2; half++)
      *reinterpret_cast<Floats*>(wide + k + half * LANES) = half_of(x + k, half);
  linear(wide, w, b, y, rows, outputs, inner, threads);
}

extern "C" void sequoia_linear_rows_float32(const float* x, const float* w, const float* b,
                                            float* y, int64_t rows, int64_t outputs, int64_t inner,
                                            int64_t threads) {
  linear(x, w, b, y, rows, outputs, inner, threads);
}
