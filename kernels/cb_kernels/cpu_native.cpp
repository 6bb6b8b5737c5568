// One scored layer on a CPU with AVX2. What is computed: ScoringPlan (plan.py). Who calls: cpu_native.py.
//
// An item is a block of one sender's positions for one KV head. Its keys are packed once, transposed, in panels of
// 24 positions, and met by all voting rows on that sender, four at a time:
//
//     4 rows x 24 positions of logits (registers) -> 2^x -> sum over the query heads (L1)
//         -> max of 7 neighbours -> sums over the rows (L1) -> written once
//
// The three positions on each side that the pool needs are computed twice. Items write disjoint columns and each is
// computed by one thread in one order: the result has the same bits whatever the number of threads.
//
// A plain C interface, no allocation, no exceptions: the caller checks everything.
#include <immintrin.h>
#include <omp.h>

#include <cstdint>
#include <cstring>

namespace {

constexpr int kLanes = 8;
constexpr int kTileRows = 4;
constexpr int kPanelVectors = 3;  // 4 x 3 sums, three vectors of keys and one of a row: the sixteen registers
constexpr int kPanel = kPanelVectors * kLanes;
constexpr int kReach = 3;  // of the pool, to each side
constexpr int kMaxBlock = 258;  // a whole number of panels together with the reach
constexpr int kColumns = kMaxBlock + 2 * kReach;
// Vectors that start near the end of a row of attention run over it by less than this.
constexpr int kStride = kColumns + 2 * kLanes;
constexpr float kScale = 256.0f;  // ENERGY_SCALE
constexpr float kLog2E = 1.44269504088896341f;

static_assert(kColumns % kPanel == 0);

}  // namespace

extern "C" {

// Consecutive voting rows of one query. column: of sender position 0 in the sums.
struct Segment {
  int64_t row_start, row_count, column;
};

// Positions start .. start + count of one sender, for one KV head and the segments that vote on that sender.
struct Item {
  int64_t slot_start, sender_len, start, count, kv_head, segment_start, segment_count;
};

// Strides count elements. key_type: 0 float32, 1 bfloat16, 2 float16.
struct Layer {
  const float* q;    // [N, H, D], the last two dimensions contiguous
  const float* lse;  // [N, H], natural logarithm
  const void* keys;  // [slots, Hkv, D], contiguous along D
  const int64_t* slots;
  const Item* items;
  const Segment* segments;
  float* sum_a;  // [Hkv, width]
  float* sum_p;
  float* scratch;  // cb_scratch_floats a thread
  int64_t q_stride, slot_stride, head_stride, item_count, heads, kv_heads, head_dim, width, key_type, sink_free,
      threads;
  float scale;
};

int64_t cb_max_block() { return kMaxBlock; }

int64_t cb_scratch_floats(int64_t head_dim) { return head_dim * kColumns + (kTileRows + 2) * kStride; }

}  // extern "C"

namespace {

// 2^x within 2e-7 for x <= 127; 0 below -126; NaN stays NaN. The polynomial is the minimax one of degree 5 for 2^f on
// [-1/2, 1/2] (relative error 7.5e-8).
inline __m256 exp2_ps(__m256 x) {
  const __m256 magic = _mm256_set1_ps(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  const __m256 tiny = _mm256_cmp_ps(x, _mm256_set1_ps(-126.0f), _CMP_LT_OQ);
  const __m256 shifted = _mm256_add_ps(x, magic);
  const __m256 f = _mm256_sub_ps(x, _mm256_sub_ps(shifted, magic));
  __m256 p = _mm256_set1_ps(1.327647199e-3f);
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(9.675541334e-3f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(5.550713273e-2f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(2.402211972e-1f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(6.931469671e-1f));
  p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.000000072f));
  const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
  const __m256 y = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent));
  return _mm256_andnot_ps(tiny, y);
}

// Maxima of a[0..6], a[1..7], .. a[7..13]. _mm256_max_ps takes its second operand where one is NaN.
inline __m256 max7(const float* a) {
  const __m256 low = _mm256_max_ps(_mm256_loadu_ps(a), _mm256_loadu_ps(a + 1));
  const __m256 middle = _mm256_max_ps(_mm256_loadu_ps(a + 2), _mm256_loadu_ps(a + 3));
  const __m256 high = _mm256_max_ps(_mm256_loadu_ps(a + 4), _mm256_loadu_ps(a + 5));
  return _mm256_max_ps(_mm256_max_ps(low, middle), _mm256_max_ps(high, _mm256_loadu_ps(a + 6)));
}

inline float to_float(float x) { return x; }

struct BFloat16 {
  uint16_t bits;
};
inline float to_float(BFloat16 x) {
  const uint32_t wide = static_cast<uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &wide, sizeof y);
  return y;
}

struct Float16 {
  uint16_t bits;
};
inline float to_float(Float16 x) { return _cvtsh_ss(x.bits); }

// The keys of an item and its reach as panels [panel][D][24]. Columns outside the sender repeat its outermost key:
// add_rows zeroes them.
template <typename Key>
void pack_keys(const Layer& layer, const Item& item, float* packed) {
  const Key* pool = static_cast<const Key*>(layer.keys) + item.kv_head * layer.head_stride;
  const int64_t* slots = layer.slots + item.slot_start;
  for (int64_t column = 0; column < item.count + 2 * kReach; column += kPanel) {
    for (int i = 0; i < kPanel; ++i) {
      const int64_t wanted = item.start - kReach + column + i, last = item.sender_len - 1;
      const int64_t position = wanted < 0 ? 0 : wanted > last ? last : wanted;
      const Key* key = pool + slots[position] * layer.slot_stride;
      for (int64_t d = 0; d < layer.head_dim; ++d) packed[d * kPanel + i] = to_float(key[d]);
    }
    packed += layer.head_dim * kPanel;
  }
}

// Attention times 256 of Rows rows on one panel, of one query head: out = or += 2^(q.k * scale + bias).
// All loops but the one over D are unrolled: GCC would otherwise keep the sums in memory, at half the speed.
template <int Rows>
inline void attend_panel(const float* q, int64_t q_stride, const float* panel, int64_t head_dim, float scale,
                         const float* bias, bool first, float* out) {
  __m256 sums[Rows][kPanelVectors];
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) sums[r][v] = _mm256_setzero_ps();
  for (int64_t d = 0; d < head_dim; ++d) {
    __m256 keys[kPanelVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) keys[v] = _mm256_loadu_ps(panel + d * kPanel + v * kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const __m256 row = _mm256_broadcast_ss(q + r * q_stride + d);
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVectors; ++v) sums[r][v] = _mm256_fmadd_ps(row, keys[v], sums[r][v]);
    }
  }
  const __m256 factor = _mm256_set1_ps(scale);
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
    const __m256 added = _mm256_set1_ps(bias[r]);
#pragma GCC unroll 4
    for (int v = 0; v < kPanelVectors; ++v) {
      float* target = out + r * kStride + v * kLanes;
      const __m256 weight = exp2_ps(_mm256_fmadd_ps(sums[r][v], factor, added));
      _mm256_storeu_ps(target, first ? weight : _mm256_add_ps(_mm256_loadu_ps(target), weight));
    }
  }
}

// The sums over Rows more rows of one segment. attention: [Rows][kStride]; the sums start at the item's first position.
template <int Rows>
void add_rows(const Layer& layer, const Item& item, int64_t row, const float* packed, float* attention, float* sum_a,
              float* sum_p) {
  const int64_t group = layer.heads / layer.kv_heads, columns = item.count + 2 * kReach;
  const float group_bias = __builtin_log2f(kScale / static_cast<float>(group));
  for (int64_t column = 0; column < columns; column += kPanel) {
    for (int64_t member = 0; member < group; ++member) {
      const int64_t head = item.kv_head * group + member;
      float bias[Rows];
      for (int r = 0; r < Rows; ++r) bias[r] = group_bias - layer.lse[(row + r) * layer.heads + head] * kLog2E;
      attend_panel<Rows>(layer.q + row * layer.q_stride + head * layer.head_dim, layer.q_stride,
                         packed + column * layer.head_dim, layer.head_dim, layer.scale * kLog2E, bias, member == 0,
                         attention + column);
    }
  }
  // Columns before the first and after the last position; with sink_free, the first position as well.
  const int64_t first = (layer.sink_free ? 1 : 0) + kReach - item.start, end = item.sender_len + kReach - item.start;
  for (int r = 0; r < Rows; ++r) {
    float* a = attention + r * kStride;
    for (int64_t column = 0; column < first; ++column) a[column] = 0.0f;
    for (int64_t column = end; column < columns; ++column) a[column] = 0.0f;
  }
  for (int64_t j = 0; j < item.count; j += kLanes) {
    __m256 a = _mm256_setzero_ps(), p = _mm256_setzero_ps();
    for (int r = 0; r < Rows; ++r) {
      const float* from = attention + r * kStride + j;
      const __m256 pooled = max7(from);
      a = _mm256_add_ps(a, _mm256_loadu_ps(from + kReach));
      p = _mm256_fmadd_ps(pooled, pooled, p);
    }
    _mm256_storeu_ps(sum_a + j, _mm256_add_ps(_mm256_loadu_ps(sum_a + j), a));
    _mm256_storeu_ps(sum_p + j, _mm256_add_ps(_mm256_loadu_ps(sum_p + j), p));
  }
}

void score_item(const Layer& layer, const Item& item, float* scratch) {
  float* packed = scratch;
  float* attention = packed + layer.head_dim * kColumns;
  float* sum_a = attention + kTileRows * kStride;
  float* sum_p = sum_a + kStride;
  if (layer.key_type == 0)
    pack_keys<float>(layer, item, packed);
  else if (layer.key_type == 1)
    pack_keys<BFloat16>(layer, item, packed);
  else
    pack_keys<Float16>(layer, item, packed);
  for (int64_t s = 0; s < item.segment_count; ++s) {
    const Segment& segment = layer.segments[item.segment_start + s];
    std::memset(sum_a, 0, 2 * kStride * sizeof(float));
    int64_t row = segment.row_start;
    const int64_t end = row + segment.row_count;
    for (; row + kTileRows <= end; row += kTileRows)
      add_rows<kTileRows>(layer, item, row, packed, attention, sum_a, sum_p);
    if (end - row == 3) add_rows<3>(layer, item, row, packed, attention, sum_a, sum_p);
    if (end - row == 2) add_rows<2>(layer, item, row, packed, attention, sum_a, sum_p);
    if (end - row == 1) add_rows<1>(layer, item, row, packed, attention, sum_a, sum_p);
    const int64_t target = item.kv_head * layer.width + segment.column + item.start;
    std::memcpy(layer.sum_a + target, sum_a, item.count * sizeof(float));
    std::memcpy(layer.sum_p + target, sum_p, item.count * sizeof(float));
  }
}

}  // namespace

extern "C" {

// Write sum_a and sum_p of every item's positions for its segments.
void cb_score_layer(const Layer* layer) {
  const int64_t scratch_floats = cb_scratch_floats(layer->head_dim);
#pragma omp parallel for schedule(dynamic, 1) num_threads(static_cast<int>(layer->threads))
  for (int64_t i = 0; i < layer->item_count; ++i)
    score_item(*layer, layer->items[i], layer->scratch + omp_get_thread_num() * scratch_floats);
}

// ScoringPlan.fold_layer for order 2, after the carries: one pass over the sums instead of a dozen a KV head.
// All arrays are [width], the sums [Hkv, width]; the outermost kReach columns are gaps. One thread: on a busy machine
// waiting for a second one costs more than this work.
void cb_fold_layer(const float* sum_a, const float* sum_p, const float* inverse_rows, int64_t kv_heads, int64_t width,
                   float* votes, float* energy, float* row_energy) {
  const float vote_share = 1.0f / (kScale * static_cast<float>(kv_heads));
  for (int64_t start = kReach; start < width - kReach; start += kMaxBlock) {
    const int64_t rest = width - kReach - start, count = rest < kMaxBlock ? rest : kMaxBlock;
    for (int64_t head = 0; head < kv_heads; ++head) {
      float mean[kStride], pooled[kStride];
      const int64_t from = start - kReach;
      for (int64_t j = 0; j < count + 2 * kReach; ++j)
        mean[j] = sum_a[head * width + from + j] * inverse_rows[from + j];
      for (int64_t j = 0; j < count; j += kLanes) _mm256_storeu_ps(pooled + j, max7(mean + j));
      for (int64_t j = 0; j < count; ++j) {
        const int64_t column = start + j;
        votes[column] += mean[kReach + j] * vote_share;
        energy[column] += pooled[j] * pooled[j];
        row_energy[column] += sum_p[head * width + column] * inverse_rows[column];
      }
    }
  }
}

}  // extern "C"
