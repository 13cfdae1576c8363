// Tree attention over vLLM's paged CPU cache: each node attends to its request's
// committed context and to its own ancestors, in one pass with an online softmax.
// Nothing is copied: keys and values are read where they lie.
//
// A block of the cache holds, per head, keys transposed [head_size, block_size]
// and then values [block_size, head_size]. So both products of attention are
// C[rows, columns] += A[rows, inner] B[inner, columns] with B as stored:
// scores = queries x keys, output = weights x values. Rows are the nodes of one
// request times the query heads that share a key head.
//
// Where vLLM finds AMX, a block's bfloat16 numbers are packed: a panel of 16 columns of B
// after the other, and in a panel two rows of B side by side, column by column.
//
// A layer may look back no further than a window, by position: a node of depth d is d
// tokens after the root. It may cap its scores softly, and have sinks: a score of each
// head that takes its share of the softmax and adds nothing.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

// Two vectors of sums for each row of a tile stay in registers: AVX-512 has 32, AVX2 16.
#ifdef __AVX512F__
constexpr int LANES = 16, ROW_TILE = 8;
#else
constexpr int LANES = 8, ROW_TILE = 6;
#endif
constexpr float MASKED = -1e30f;
typedef float Floats __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2), aligned(2)));

struct Float32 {
  typedef float Stored;
  static constexpr bool PACKED = false;
  static Floats load(const float* from) { return *reinterpret_cast<const Floats*>(from); }
  static float encode(float value) { return value; }
};

struct BFloat16 {
  typedef uint16_t Stored;
  static constexpr bool PACKED = false;
  static Floats load(const uint16_t* from) {
    Halves raw = *reinterpret_cast<const Halves*>(from);
    return reinterpret_cast<Floats>(__builtin_convertvector(raw, Ints) << 16);
  }
  static uint16_t encode(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (value != value) return bits >> 16 | 0x40;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to the nearest, ties to even
  }
};

// In pairs of rows; an even row's numbers lie in the low halves of 32 bits.
struct PackedBFloat16 : BFloat16 {
  static constexpr bool PACKED = true;
  static Floats even(const uint16_t* pair) {
    return reinterpret_cast<Floats>(*reinterpret_cast<const Ints*>(pair) << 16);
  }
  static Floats odd(const uint16_t* pair) {
    return reinterpret_cast<Floats>(*reinterpret_cast<const Ints*>(pair) & ~0xffff);
  }
};

struct Float16 {
  typedef uint16_t Stored;
  static constexpr bool PACKED = false;
  static Floats load(const uint16_t* from) {
    // Exponent and mantissa in float32's places, then the exponent's bias is
    // made up for by a multiplication, which subnormals survive.
    Ints bits = __builtin_convertvector(*reinterpret_cast<const Halves*>(from), Ints);
    Ints magnitude = (bits & 0x7fff) << 13;
    Floats size = reinterpret_cast<Floats>(magnitude) * 0x1p112f;
    size = magnitude >= 0x7c00 << 13 ? reinterpret_cast<Floats>(magnitude | 0x7f800000) : size;
    return reinterpret_cast<Floats>(reinterpret_cast<Ints>(size) | ((bits & 0x8000) << 16));
  }
  static uint16_t encode(float value) {
    const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const float size = std::fabs(value);
    if (size != size) return sign | 0x7e00;
    if (size >= 65520.f) return sign | 0x7c00;
    uint32_t bits;
    if (size < 0x1p-14f) {  // subnormal: adding 0.5 leaves the rounded mantissa in the low bits
      const float shifted = size + 0.5f;
      std::memcpy(&bits, &shifted, sizeof bits);
      return sign | (bits - 0x3f000000);
    }
    std::memcpy(&bits, &size, sizeof bits);
    return sign | (bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13;
  }
};

// 2^x for x <= 0; 0 below the smallest normal float.
inline Floats exp2_vector(Floats x) {
  Floats clamped = x < -126.f ? Floats{} - 126.f : x;
  Ints whole = __builtin_convertvector(clamped - 0.5f, Ints);  // to the nearest
  Floats part = clamped - __builtin_convertvector(whole, Floats);
  // Taylor series of 2^part; |part| <= 1/2, so the error is below float32's.
  Floats sum = part * 1.5252734e-5f + 1.5403530e-4f;
  sum = sum * part + 1.3333558e-3f;
  sum = sum * part + 9.6181291e-3f;
  sum = sum * part + 5.5504109e-2f;
  sum = sum * part + 2.4022651e-1f;
  sum = sum * part + 6.9314718e-1f;
  sum = sum * part + 1.f;
  Floats value = sum * reinterpret_cast<Floats>((whole + 127) << 23);
  return x < -126.f ? Floats{} : value;
}

constexpr int64_t PANEL = 16;  // columns

// Where the pair of numbers that has this one lies in a packed matrix, panels so far apart.
inline int64_t pair_at(int64_t row, int64_t column, int64_t panels) {
  return column / PANEL * panels + row / 2 * 2 * PANEL + column % PANEL * 2;
}

// A matrix in the cache, from one of its rows on. If packed, `stride` is from panel to panel.
template <class Cache>
struct Stored2D {
  const typename Cache::Stored* data;
  int64_t stride, first;

  Stored2D from(int64_t row) const { return {data, stride, first + row}; }

  // Packed: the pair that has this row.
  const typename Cache::Stored* at(int64_t row, int64_t column) const {
    if constexpr (Cache::PACKED)
      return data + pair_at(first + row, column, stride);
    else
      return data + (first + row) * stride + column;
  }

  Floats load(int64_t row, int64_t column) const {
    if constexpr (Cache::PACKED)
      return (first + row) % 2 ? Cache::odd(at(row, column)) : Cache::even(at(row, column));
    else
      return Cache::load(at(row, column));
  }
};

// C[ROWS, VECTORS * LANES] += A[ROWS, inner] B[inner, VECTORS * LANES], from a column of B on.
template <class Cache, int ROWS, int VECTORS>
void multiply_tile(const float* a, int64_t a_stride, const Stored2D<Cache>& b, int64_t column,
                   int64_t inner, float* c, int64_t c_stride) {
  Floats sums[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 2
    for (int vector = 0; vector < VECTORS; ++vector)
      sums[row][vector] = Float32::load(c + row * c_stride + vector * LANES);
  const auto add = [&](int64_t k) {
    Floats loaded[VECTORS];
#pragma GCC unroll 2
    for (int vector = 0; vector < VECTORS; ++vector)
      loaded[vector] = b.load(k, column + vector * LANES);
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 2
      for (int vector = 0; vector < VECTORS; ++vector)
        sums[row][vector] += a[row * a_stride + k] * loaded[vector];
  };
  int64_t k = 0;
  if constexpr (Cache::PACKED) {
    if (b.first % 2 && inner > 0) add(k++);
    for (; k + 1 < inner; k += 2) {
      Floats even[VECTORS], odd[VECTORS];
#pragma GCC unroll 2
      for (int vector = 0; vector < VECTORS; ++vector) {
        const typename Cache::Stored* pair = b.at(k, column + vector * LANES);
        even[vector] = Cache::even(pair), odd[vector] = Cache::odd(pair);
      }
#pragma GCC unroll 8
      for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 2
        for (int vector = 0; vector < VECTORS; ++vector) {
          sums[row][vector] += a[row * a_stride + k] * even[vector];
          sums[row][vector] += a[row * a_stride + k + 1] * odd[vector];
        }
    }
  }
  for (; k < inner; ++k) add(k);
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 2
    for (int vector = 0; vector < VECTORS; ++vector)
      *reinterpret_cast<Floats*>(c + row * c_stride + vector * LANES) = sums[row][vector];
}

template <class Cache, int ROWS>
void multiply_rows(const float* a, int64_t a_stride, const Stored2D<Cache>& b, int64_t inner,
                   float* c, int64_t c_stride, int64_t columns) {
  int64_t column = 0;
  for (; column + 2 * LANES <= columns; column += 2 * LANES)
    multiply_tile<Cache, ROWS, 2>(a, a_stride, b, column, inner, c + column, c_stride);
  if (column < columns)
    multiply_tile<Cache, ROWS, 1>(a, a_stride, b, column, inner, c + column, c_stride);
}

// C[rows, columns] += A[rows, inner] B[inner, columns]; columns: a multiple of LANES.
template <class Cache>
void multiply(const float* a, int64_t a_stride, const Stored2D<Cache>& b, int64_t rows,
              int64_t inner, float* c, int64_t c_stride, int64_t columns) {
  for (int64_t row = 0; row < rows; row += ROW_TILE) {
    const float* own_a = a + row * a_stride;
    float* own_c = c + row * c_stride;
    switch (std::min<int64_t>(ROW_TILE, rows - row)) {
#define TILE(n)                                                                      \
  case n:                                                                            \
    multiply_rows<Cache, n>(own_a, a_stride, b, inner, own_c, c_stride, columns);    \
    break;
      TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) TILE(7) TILE(8)
#undef TILE
    }
  }
}

}  // namespace

// What stays the same for all layers of a step. Its Python twin is TreeBatch in
// cpu_kernel.py: same fields, same order.
struct TreeBatch {
  const int64_t* rows;          // [batch, queries]: row of each node; below 0: padding
  const int32_t* block_table;   // [batch, table_stride]
  const int64_t* context_lens;  // [batch]: slots below are context
  const int64_t* num_nodes;     // [batch]: the slots after them that hold the tree
  const uint8_t* ancestors;     // [batch or 1, queries, ancestors_stride]: query sees node
  const int64_t* depths;        // [batch or 1, queries]: below its root; read if there is a window
  float* partials;              // [batch, key_heads, splits, rows, head_size + 2]
  uint8_t* spoilt;              // [1]: set where a node's values are not finite
  int64_t batch, queries, heads, key_heads, head_size, block_size;
  int64_t table_stride, ancestors_stride, splits, threads, dtype;
  int64_t window;               // tokens that a query sees, itself included; 0: all before it
  float scale;                  // of the softmax, times log2(e)
  float soft_cap;               // of the scores, times log2(e); 0: none
  bool one_tree;                // all requests have the same tree: ancestors and depths of one

  const uint8_t* ancestors_of(int64_t request) const {
    return ancestors + (one_tree ? 0 : request * queries * ancestors_stride);
  }
  const int64_t* depths_of(int64_t request) const {
    return depths + (one_tree ? 0 : request * queries);
  }
};

namespace {

struct CacheShape {
  int64_t key_heads, head_size, block_size;
  bool packed;
};

// Sums of one part of the context: what the softmax has seen so far.
struct Partial {
  float* largest;  // [rows]
  float* total;    // [rows]
  float* output;   // [rows, head_size], not yet divided by total
};

// cap * tanh(scores / cap), in place.
void cap_softly(float* scores, int64_t count, float cap) {
  const float twice = -2.f / std::log(2.f) / cap;
  for (int64_t index = 0; index < count; index += LANES) {
    Floats score = Float32::load(scores + index);
    Floats size = score < 0.f ? -score : score;
    Floats rest = exp2_vector(size * twice);
    Floats capped = (1.f - rest) / (1.f + rest) * cap;
    *reinterpret_cast<Floats*>(scores + index) = score < 0.f ? -capped : capped;
  }
}

// The first position that a node of this depth sees.
inline int64_t first_seen(const TreeBatch& given, int64_t request, int64_t depth) {
  const int64_t position = given.context_lens[request] + depth;
  return given.window > 0 ? std::max<int64_t>(0, position - given.window + 1) : 0;
}

// The first position that some node of a request sees: blocks before it may be another's, and
// in its own block nobody need have written what lies before it.
inline int64_t first_position(const TreeBatch& given, int64_t request) {
  if (given.window <= 0) return 0;
  const int64_t* depths = given.depths_of(request);
  const int64_t depth = *std::min_element(depths, depths + given.queries);
  return first_seen(given, request, depth);
}

// The first position that every node of a request sees.
inline int64_t last_start(const TreeBatch& given, int64_t request) {
  if (given.window <= 0) return 0;
  const int64_t* depths = given.depths_of(request);
  return first_seen(given, request, *std::max_element(depths, depths + given.queries));
}

inline bool sees(const TreeBatch& given, int64_t request, int64_t query, int64_t slot) {
  const int64_t node = slot - given.context_lens[request];
  if (node >= 0) return given.ancestors_of(request)[query * given.ancestors_stride + node];
  return given.window <= 0 || slot >= first_seen(given, request, given.depths_of(request)[query]);
}

template <class Cache>
inline bool is_finite(const Stored2D<Cache>& values, int64_t key, int64_t size) {
  Floats rest = {};
  for (int64_t column = 0; column < size; column += LANES) {
    const Floats value = values.load(key, column);
    rest += value - value;  // 0, or NaN
  }
  for (int lane = 0; lane < LANES; ++lane)
    if (rest[lane] != 0.f) return false;
  return true;
}

// Masks what of a block's scores lies before the windows of the rows.
void mask_before_windows(const TreeBatch& given, int64_t request, int64_t start, int64_t columns,
                         float* scores) {
  const int64_t group = given.heads / given.key_heads;
  const int64_t* depths = given.depths_of(request);
  for (int64_t query = 0; query < given.queries; ++query) {
    const int64_t before = first_seen(given, request, depths[query]) - start;
    if (before <= 0) continue;
    for (int64_t row = query * group; row < (query + 1) * group; ++row)
      std::fill_n(scores + row * given.block_size, std::min(before, columns), MASKED);
  }
}

// Weights of one block in place of its scores; rescales what was summed before.
void softmax_block(float* scores, int64_t rows, int64_t keys, int64_t block_size, int64_t head_size,
                   const Partial& sums) {
  for (int64_t row = 0; row < rows; ++row) {
    float* own = scores + row * block_size;
    Floats highest = Float32::load(own);
    for (int64_t key = LANES; key < keys; key += LANES) {
      Floats next = Float32::load(own + key);
      highest = next > highest ? next : highest;
    }
    float largest = sums.largest[row];
    for (int lane = 0; lane < LANES; ++lane) largest = std::max(largest, highest[lane]);
    Floats total = {};
    for (int64_t key = 0; key < keys; key += LANES) {
      Floats weight = exp2_vector(Float32::load(own + key) - largest);
      *reinterpret_cast<Floats*>(own + key) = weight;
      total += weight;
    }
    float scale = std::exp2(sums.largest[row] - largest);
    sums.largest[row] = largest;
    sums.total[row] *= scale;
    for (int lane = 0; lane < LANES; ++lane) sums.total[row] += total[lane];
    if (scale == 1.f) continue;
    float* output = sums.output + row * head_size;
    for (int64_t column = 0; column < head_size; column += LANES)
      *reinterpret_cast<Floats*>(output + column) *= scale;
  }
}

// One request and key head over the cache blocks [first, last), going on from `sums`.
template <class Cache>
void attend(const TreeBatch& given, const void* cache, int64_t request, int64_t key_head,
            int64_t first, int64_t last, const float* query, float* scores, const Partial& sums) {
  const int64_t group = given.heads / given.key_heads, rows = given.queries * group;
  const int64_t size = given.head_size, block_size = given.block_size;
  const int64_t context = given.context_lens[request];
  const int64_t lowest = first_position(given, request), highest = last_start(given, request);
  const int64_t end = context + given.num_nodes[request];
  for (int64_t block = first; block < last; ++block) {
    const int64_t number = given.block_table[request * given.table_stride + block];
    const typename Cache::Stored* stored =
        static_cast<const typename Cache::Stored*>(cache) +
        (number * given.key_heads + key_head) * 2 * size * block_size;
    const Stored2D<Cache> keys{stored, Cache::PACKED ? PANEL * size : block_size, 0};
    const Stored2D<Cache> values{stored + size * block_size,
                                 Cache::PACKED ? PANEL * block_size : size, 0};
    const int64_t start = block * block_size, used = std::min(block_size, end - start);
    const int64_t columns = (used + LANES - 1) / LANES * LANES;
    for (int64_t row = 0; row < rows; ++row) std::fill_n(scores + row * block_size, columns, 0.f);
    multiply<Cache>(query, size, keys, rows, size, scores, block_size, columns);
    if (given.soft_cap > 0.f)
      for (int64_t row = 0; row < rows; ++row)
        cap_softly(scores + row * block_size, columns, given.soft_cap);
    if (given.window > 0) mask_before_windows(given, request, start, columns, scores);
    for (int64_t slot = std::max(context, start); slot < start + columns; ++slot)
      for (int64_t row = 0; row < rows; ++row)
        if (slot >= end || !sees(given, request, row / group, slot))
          scores[row * block_size + slot - start] = MASKED;
    softmax_block(scores, rows, columns, block_size, size, sums);
    // A weight of 0 leaves NaN what it is. So values that nobody sees are not read, and those
    // that are not finite count for the rows that see them alone.
    int64_t from = std::max<int64_t>(0, lowest - start);
    for (int64_t key = from; key <= used; ++key) {
      const int64_t slot = start + key;
      const bool all_see = slot >= highest && slot < context;
      if (key < used && (all_see || is_finite<Cache>(values, key, size))) continue;
      multiply<Cache>(scores + from, block_size, values.from(from), rows, key - from, sums.output,
                      size, size);
      from = key + 1;
      if (key < used && slot >= context) __atomic_store_n(given.spoilt, 1, __ATOMIC_RELAXED);
      for (int64_t row = 0; key < used && row < rows; ++row)
        if (sees(given, request, row / group, slot))
          multiply<Cache>(scores + row * block_size + key, block_size, values.from(key), 1, 1,
                          sums.output + row * size, size, size);
    }
  }
}

// What the softmax has seen before any key: the sinks, in one part of each request, or nothing.
void start_sums(const TreeBatch& given, const float* sinks, int64_t key_head, int64_t rows,
                const Partial& sums) {
  const int64_t group = given.heads / given.key_heads;
  for (int64_t row = 0; row < rows; ++row) {
    sums.largest[row] =
        sinks ? sinks[key_head * group + row % group] / std::log(2.f) : MASKED;
    sums.total[row] = sinks ? 1.f : 0.f;
  }
  std::fill_n(sums.output, rows * given.head_size, 0.f);
}

// Row of a node and query head in the batch's flat tokens, or below 0 for padding.
inline int64_t token_of(const TreeBatch& given, int64_t request, int64_t row) {
  return given.rows[request * given.queries + row / (given.heads / given.key_heads)];
}

template <class Cache>
void load_queries(const TreeBatch& given, const typename Cache::Stored* query, int64_t stride,
                  int64_t request, int64_t key_head, int64_t rows, float* loaded) {
  const int64_t group = given.heads / given.key_heads, size = given.head_size;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t head = key_head * group + row % group;
    const int64_t token = std::max<int64_t>(0, token_of(given, request, row));
    for (int64_t column = 0; column < size; column += LANES)
      *reinterpret_cast<Floats*>(loaded + row * size + column) =
          Cache::load(query + token * stride + head * size + column) * given.scale;
  }
}

// One request and key head: adds up its parts and writes the output.
template <class Cache>
void finish(const TreeBatch& given, typename Cache::Stored* output, int64_t stride,
            int64_t request, int64_t key_head, int64_t rows, float* first) {
  const int64_t group = given.heads / given.key_heads, size = given.head_size;
  const int64_t partial_size = rows * (size + 2);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t token = token_of(given, request, row);
    if (token < 0) continue;
    float largest = MASKED, total = 0.f;
    for (int64_t split = 0; split < given.splits; ++split)
      largest = std::max(largest, first[split * partial_size + row]);
    float* sums = first + 2 * rows + row * size;
    for (int64_t split = 0; split < given.splits; ++split) {
      const float* part = first + split * partial_size;
      const float weight = std::exp2(part[row] - largest);
      total += weight * part[rows + row];
      for (int64_t column = 0; column < size; ++column) {
        const float value = weight * part[2 * rows + row * size + column];
        sums[column] = split == 0 ? value : sums[column] + value;
      }
    }
    typename Cache::Stored* own = output + token * stride + (key_head * group + row % group) * size;
    for (int64_t column = 0; column < size; ++column)
      own[column] = Cache::encode(sums[column] / total);
  }
}

template <class Cache>
void run(const TreeBatch& given, const void* query, int64_t query_stride, void* output,
         int64_t output_stride, const void* cache, const float* sinks) {
  typedef typename Cache::Stored Stored;
  const int64_t rows = given.queries * (given.heads / given.key_heads), size = given.head_size;
  const int64_t units = given.batch * given.key_heads, partial_size = rows * (size + 2);
  const int64_t splits = given.splits;
#pragma omp parallel num_threads(given.threads) if (given.threads > 1)
  {
    std::vector<float> scratch(rows * (size + given.block_size));
    float *loaded = scratch.data(), *scores = loaded + rows * size;
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < units * splits; ++task) {
      const int64_t request = task / splits / given.key_heads, split = task % splits;
      const int64_t key_head = task / splits % given.key_heads;
      const int64_t end = given.context_lens[request] + given.num_nodes[request];
      const int64_t skipped = first_position(given, request) / given.block_size;
      const int64_t blocks = (end + given.block_size - 1) / given.block_size - skipped;
      load_queries<Cache>(given, static_cast<const Stored*>(query), query_stride, request,
                          key_head, rows, loaded);
      float* own = given.partials + task * partial_size;
      const Partial sums{own, own + rows, own + 2 * rows};
      start_sums(given, split == 0 ? sinks : nullptr, key_head, rows, sums);
      attend<Cache>(given, cache, request, key_head, skipped + blocks * split / splits,
                    skipped + blocks * (split + 1) / splits, loaded, scores, sums);
    }
#pragma omp for schedule(static)
    for (int64_t unit = 0; unit < units; ++unit)
      finish<Cache>(given, static_cast<Stored*>(output), output_stride, unit / given.key_heads,
                    unit % given.key_heads, rows, given.partials + unit * splits * partial_size);
  }
}

template <class Stored>
void move(Stored* cache, const CacheShape& shape, const int64_t* source, const int64_t* target,
          int64_t count, Stored* kept) {
  const int64_t size = shape.head_size, block_size = shape.block_size;
  const auto each = [&](int64_t slot, int64_t head, Stored* token, bool read) {
    Stored* keys = cache + (slot / block_size * shape.key_heads + head) * 2 * size * block_size;
    Stored* values = keys + size * block_size;
    const int64_t place = slot % block_size;
    for (int64_t i = 0; i < size; ++i) {
      Stored& key = keys[shape.packed ? pair_at(i, place, PANEL * size) + i % 2
                                      : i * block_size + place];
      Stored& value = values[shape.packed ? pair_at(place, i, PANEL * block_size) + place % 2
                                          : place * size + i];
      if (read) token[i] = key, token[size + i] = value;
      else key = token[i], value = token[size + i];
    }
  };
  for (int64_t head = 0; head < shape.key_heads; ++head) {
    for (int64_t i = 0; i < count; ++i) each(source[i], head, kept + i * 2 * size, true);
    for (int64_t i = 0; i < count; ++i) each(target[i], head, kept + i * 2 * size, false);
  }
}

}  // namespace

extern "C" const int64_t sequoia_lanes = LANES;

// Copies tokens between slots of several layers' caches, all reads of a layer
// before its writes. element_size: 2 or 4 bytes; packed: 1 or 0.
extern "C" void sequoia_move_tokens(void* const* caches, int64_t num_caches, int64_t element_size,
                                    int64_t packed, int64_t key_heads, int64_t head_size,
                                    int64_t block_size, const int64_t* source,
                                    const int64_t* target, int64_t count) {
  const CacheShape shape{key_heads, head_size, block_size, packed != 0};
  std::vector<uint32_t> kept(count * 2 * head_size);
  for (int64_t i = 0; i < num_caches; ++i) {
    if (element_size == 4)
      move(static_cast<uint32_t*>(caches[i]), shape, source, target, count, kept.data());
    else
      move(static_cast<uint16_t*>(caches[i]), shape, source, target, count,
           reinterpret_cast<uint16_t*>(kept.data()));
  }
}

// Query and output: [tokens, heads, head_size] with these strides between tokens,
// and the cache [blocks, key_heads, 2 * head_size * block_size], all in the dtype
// that TreeBatch names: 0 float32, 1 bfloat16, 2 float16, 3 bfloat16 in a packed cache.
// Sinks: [heads], or null.
extern "C" void sequoia_tree_attention(const TreeBatch* batch, const void* query,
                                       int64_t query_stride, void* output, int64_t output_stride,
                                       const void* cache, const float* sinks) {
  if (batch->dtype == 0)
    run<Float32>(*batch, query, query_stride, output, output_stride, cache, sinks);
  else if (batch->dtype == 1)
    run<BFloat16>(*batch, query, query_stride, output, output_stride, cache, sinks);
  else if (batch->dtype == 3)
    run<PackedBFloat16>(*batch, query, query_stride, output, output_stride, cache, sinks);
  else
    run<Float16>(*batch, query, query_stride, output, output_stride, cache, sinks);
}
