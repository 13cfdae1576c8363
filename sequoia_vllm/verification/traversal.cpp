// Traversal verification (arXiv 2505.12398) of a batch of trees, as `traverse_tree` does it:
// the same decisions from the same numbers, one request after another.
//
// What rejections leave of a node's distributions is not written anywhere. With M starting as
// P and D as Q, after some rejected children
//
//     M = (P - scale*Q - shift)+ / target_mass   and   D = Q / draft_mass
//
// on the tokens not rejected, and M = 0 on the others: a child is rejected for certain or
// because a*M < D there. Where draft_mass is 0, D is uniform over the tokens not rejected, of
// which Q has none. So a rejection costs one pass that reads P and Q.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace {

constexpr int LANES = 16;
constexpr int64_t BLOCK = 256 * LANES;  // sums of blocks are added in float64

template <class Real>
using Lanes __attribute__((vector_size(LANES * sizeof(Real)), aligned(sizeof(Real)))) = Real;

struct Sums {
  double target = 0, draft = 0;
};

// Infinity times a Q of 0 would be NaN.
template <class Real>
Real finite(double value) {
  return static_cast<Real>(std::min<double>(value, std::numeric_limits<Real>::max()));
}

// Adds sums of (P - scale*Q - shift)+ and of Q over [begin, end).
template <class Real>
void add_sums(Sums& sums, const Real* target, const Real* draft, Real scale, Real shift,
              int64_t begin, int64_t end) {
  while (begin < end) {
    const int64_t stop = std::min(begin + BLOCK, end);
    Lanes<Real> targets{}, drafts{};
    for (; begin + LANES <= stop; begin += LANES) {
      const auto p = *reinterpret_cast<const Lanes<Real>*>(target + begin);
      const auto q = *reinterpret_cast<const Lanes<Real>*>(draft + begin);
      const auto left = p - q * scale - shift;
      targets += left > 0 ? left : Lanes<Real>{};
      drafts += q;
    }
    for (int lane = 0; lane < LANES; ++lane) {
      sums.target += targets[lane];
      sums.draft += drafts[lane];
    }
    for (; begin < stop; ++begin) {
      sums.target += std::max(target[begin] - draft[begin] * scale - shift, Real(0));
      sums.draft += draft[begin];
    }
  }
}

// One node whose children are looked at.
template <class Real>
struct Open {
  const Real* target;
  const Real* draft;
  double chance;
  double target_mass = 1, draft_mass = 1;
  Real scale = 0, shift = 0;
  std::vector<int64_t> rejected{};  // in order

  Real left(int64_t token) const {
    return std::max(target[token] - draft[token] * scale - shift, Real(0));
  }

  double uniform(int64_t vocabulary) const {
    return 1. / std::max<int64_t>(vocabulary - static_cast<int64_t>(rejected.size()), 1);
  }

  double chance_of_child(int64_t token, int64_t vocabulary) const {
    const double wanted = chance * left(token) / target_mass;
    const double drawn = draft_mass > 0 ? draft[token] / draft_mass : uniform(vocabulary);
    // A child that Q cannot have drawn is certain, unless it is impossible.
    return drawn > 0 ? std::min(wanted / drawn, 1.) : wanted > 0;
  }

  void reject(int64_t token, int64_t vocabulary) {
    const bool exhausted = draft_mass == 0;
    const double more = target_mass / chance;
    const Real new_scale = exhausted ? scale : finite<Real>(scale + more / draft_mass);
    const Real new_shift = exhausted ? finite<Real>(shift + more * uniform(vocabulary)) : shift;
    rejected.insert(std::upper_bound(rejected.begin(), rejected.end(), token), token);
    Sums sums;
    int64_t begin = 0;
    for (const int64_t gap : rejected) {
      add_sums(sums, target, draft, new_scale, new_shift, begin, gap);
      begin = gap + 1;
    }
    add_sums(sums, target, draft, new_scale, new_shift, begin, vocabulary);
    draft_mass = sums.draft;
    if (sums.target > 0) {
      const double kept = chance * sums.target / target_mass;
      // 1 - a first: a certain path stays certain to the bit.
      chance = kept / (kept + (1 - chance));
      scale = new_scale, shift = new_shift, target_mass = sums.target;
    } else if (chance < 1) {
      chance = 0;  // else certain but for rounding: M stays what it was
    }
  }
};

}  // namespace

extern "C" {

// `sequoia_vllm.verification.traversal._Trees`: same fields, same order.
struct Trees {
  const int64_t *children, *tokens, *rows;  // [B, N, b], [B, N], [B, N]
  const double* uniforms;                   // [B, N]
  const void *target, *draft;               // [R, V], float32 or float64
  int64_t* accepted;                        // [B]
  void* rest;                               // [B, V], as target and draft
  int64_t batch, nodes, branches, vocabulary, is_float64, threads;
};

}

namespace {

template <class Real>
struct Traversal {
  const Trees& trees;
  const int64_t *children, *tokens, *rows;
  const double* uniforms;
  Real* rest;

  Traversal(const Trees& given, int64_t request)
      : trees(given),
        children(given.children + request * given.nodes * given.branches),
        tokens(given.tokens + request * given.nodes),
        rows(given.rows + request * given.nodes),
        uniforms(given.uniforms + request * given.nodes),
        rest(static_cast<Real*>(given.rest) + request * given.vocabulary) {}

  // The node at the end of the accepted path, at this one or below; -1: none.
  int64_t visit(int64_t node, double chance) const {
    const int64_t* below = children + node * trees.branches;
    if (trees.branches == 0 || below[0] < 0) return accepts(node, chance) ? node : -1;
    const int64_t row = rows[node] * trees.vocabulary;
    Open<Real> open{static_cast<const Real*>(trees.target) + row,
                    static_cast<const Real*>(trees.draft) + row, chance};
    for (int64_t rank = 0; rank < trees.branches && below[rank] >= 0; ++rank) {
      const int64_t token = tokens[below[rank]];
      const double child_chance = open.chance_of_child(token, trees.vocabulary);
      const int64_t found = child_chance > 0 ? visit(below[rank], child_chance) : -1;
      if (found >= 0) return found;
      open.reject(token, trees.vocabulary);
      if (open.chance == 0 && !std::isnan(*open.target)) return -1;
    }
    // A row of NaN accepts no child, and keeps its own chance.
    if (std::isnan(*open.target)) open.chance = chance;
    if (!accepts(node, open.chance)) return -1;
    for (int64_t token = 0; token < trees.vocabulary; ++token) rest[token] = open.left(token);
    for (const int64_t token : open.rejected) rest[token] = 0;
    return node;
  }

  // The root whatever its number, which is for the token after the path.
  bool accepts(int64_t node, double chance) const { return node == 0 || uniforms[node] < chance; }
};

}  // namespace

// Writes each request's last accepted node (0: the root), and what is left of P there, up to a
// factor, where that node has children.
extern "C" void sequoia_traverse(const Trees* trees) {
#pragma omp parallel for schedule(dynamic) num_threads(trees->threads)
  for (int64_t request = 0; request < trees->batch; ++request)
    trees->accepted[request] = trees->is_float64
                                   ? Traversal<double>(*trees, request).visit(0, 1)
                                   : Traversal<float>(*trees, request).visit(0, 1);
}
