// dcut::ConfidenceTopKPack (contract.py) in one launch of one block.
//
// A phase is what all threads do between two barriers: no thread may read what another writes within it. Nothing lives
// in a thread's registers across phases but PER_THREAD values, so a host build can run each phase as a loop over the
// threads in any order. FOR_EACH_WARP is a phase in which warps do not depend on each other, and FOR_EACH_LANE a step
// of it, ordered within the warp alone.

#ifndef FOR_EACH_THREAD
#define FOR_EACH_THREAD(t) for (int t = threadIdx.x, once = 1; once; once = 0, __syncthreads())
#define FOR_EACH_WARP(w) for (int w = threadIdx.x / kWarp, once_w = 1; once_w; once_w = 0, __syncthreads())
#define FOR_EACH_LANE(t, w) for (int t = w * kWarp + threadIdx.x % kWarp, once = 1; once; once = 0, __syncwarp())
#define PER_THREAD(type, name) type name
#define OWN(name, t) name
#endif

namespace {

constexpr int kThreads = 1024;
constexpr int kWarp = 32;
constexpr int kItems = 4;  // consecutive ranks of one thread
constexpr int kMaxPositions = kThreads * kItems;
constexpr int kMaxRows = kMaxPositions / 2;  // D is at least 1
constexpr int kRows = kMaxRows / kThreads;   // consecutive requests of one thread
constexpr int kMaxBudgets = 32;

using Key = unsigned long long;

// Ascending keys are falling scores, then rising candidate = depth * B + row, so no two keys are equal.
// The bits of a float without its sign order as its magnitude does; scores are 0 or negative.
__device__ Key make_key(float score, int candidate) {
  return Key(__float_as_uint(score) & 0x7fffffffu) << 32 | unsigned(candidate);
}
__device__ float score_of(Key key) { return -__uint_as_float(unsigned(key >> 32)); }
__device__ int candidate_of(Key key) { return int(unsigned(key)); }

__device__ int clamp(int value, int low, int high) { return value < low ? low : value > high ? high : value; }

// One step of a bitonic sort: runs of `width` keys alternately rise and fall, partners are `stride` apart.
// With stride <= kWarp both partners lie in the 2 * kWarp keys that this thread's warp alone works on.
__device__ void exchange(Key* keys, int size, int width, int stride, int thread) {
  for (int pair = thread; pair < size / 2; pair += kThreads) {
    const int low = 2 * pair - (pair & (stride - 1)), high = low + stride;
    const Key first = keys[low], second = keys[high];
    if ((first > second) == ((low & width) == 0)) {
      keys[low] = second;
      keys[high] = first;
    }
  }
}

// size: a power of two.
__device__ void sort_keys(Key* keys, int size) {
  FOR_EACH_WARP(w) {
    for (int width = 2; width <= 2 * kWarp && width <= size; width *= 2)
      for (int stride = width / 2; stride > 0; stride /= 2)
        FOR_EACH_LANE(t, w) exchange(keys, size, width, stride, t);
  }
  for (int width = 4 * kWarp; width <= size; width *= 2) {
    for (int stride = width / 2; stride > kWarp; stride /= 2)
      FOR_EACH_THREAD(t) exchange(keys, size, width, stride, t);
    FOR_EACH_WARP(w) {
      for (int stride = kWarp; stride > 0; stride /= 2)
        FOR_EACH_LANE(t, w) exchange(keys, size, width, stride, t);
    }
  }
}

// Running sums of values[0 .. count), in place and in an order that does not depend on timing; count <= kThreads.
template <typename T>
__device__ void inclusive_scan(T* values, int count) {
  PER_THREAD(T, before);
  for (int stride = 1; stride < count; stride *= 2) {
    FOR_EACH_THREAD(t) OWN(before, t) = t >= stride && t < count ? values[t - stride] : T(0);
    FOR_EACH_THREAD(t) if (t < count) values[t] += OWN(before, t);
  }
}

struct Inputs {  // shapes as in contract.py
  const int* tokens;
  const float* confidence;
  const int *anchors, *anchor_positions, *budgets;
  const float* cost_ms;
  const int* bypass;
  int batch, length, ratios;
  __device__ int block() const { return length + 1; }
  __device__ int count() const { return batch * block(); }
};

struct Outputs {
  int *bucket, *keep, *subsequence_begins, *token_ids, *request_rows, *depths, *positions;
};

// The key of every candidate in its own place; keys from there to `sorted` come last.
__device__ void make_keys(const Inputs& in, Key* keys, int sorted) {
  FOR_EACH_THREAD(t) {  // logarithms first, each where its candidate's key will stand
    for (int index = t; index < in.batch * in.length; index += kThreads) {
      const float given = in.confidence[index];
      const float probability = given > 0.0f ? fminf(given, 1.0f) : 0.0f;  // NaN is not above 0
      keys[(index % in.length + 1) * in.batch + index / in.length] = __float_as_uint(logf(probability));
    }
    for (int index = in.count() + t; index < sorted; index += kThreads) keys[index] = ~Key(0);
  }
  FOR_EACH_THREAD(t) {
    for (int row = t; row < in.batch; row += kThreads) {
      float score = 0.0f;
      keys[row] = make_key(score, row);
      for (int candidate = row + in.batch; candidate < in.count(); candidate += in.batch) {
        score += __uint_as_float(unsigned(keys[candidate]));
        keys[candidate] = make_key(score, candidate);
      }
    }
  }
}

// Expected tokens per millisecond of each budget, 0 for one that is ruled out. expected: double[kThreads] to work in.
__device__ void measure(const Inputs& in, const Key* keys, double* expected, int* sizes, double* utilities) {
  FOR_EACH_THREAD(t) {
    if (t < in.ratios) sizes[t] = clamp(in.budgets[t], in.batch, in.count());
    double sum = 0.0;
    for (int rank = t * kItems; rank < (t + 1) * kItems && rank < in.count(); ++rank) sum += expf(score_of(keys[rank]));
    expected[t] = sum;
  }
  inclusive_scan(expected, (in.count() + kItems - 1) / kItems);
  FOR_EACH_THREAD(t) {
    for (int ratio = 0; ratio < in.ratios; ++ratio) {
      const int last = sizes[ratio] - 1;
      if (last / kItems != t) continue;
      double sum = t > 0 ? expected[t - 1] : 0.0;
      for (int rank = t * kItems; rank <= last; ++rank) sum += expf(score_of(keys[rank]));
      const float cost = in.cost_ms[ratio];
      utilities[ratio] = cost > 0.0f && cost < INFINITY ? sum / cost : 0.0;
    }
  }
}

// The bucket, by one thread; returns K.
__device__ int choose(const Inputs& in, const int* sizes, const double* utilities, int* bucket) {
  double best = 0.0;
  int chosen = in.ratios - 1;
  for (int ratio = 0; ratio < in.ratios; ++ratio) {
    if (utilities[ratio] > best) {
      best = utilities[ratio];
      chosen = ratio;
    }
  }
  *bucket = *in.bypass ? in.ratios : chosen;
  return *in.bypass ? in.batch : sizes[chosen];
}

// First packed row of a request, from the row counts of all requests and their running sums over kRows requests each.
__device__ int first_row(const int* lengths, const int* sums, int row) {
  const int group = row / kRows;
  int first = group > 0 ? sums[group - 1] : 0;
  for (int other = group * kRows; other < row; ++other) first += lengths[other];
  return first;
}

__device__ void pack(const Inputs& in, const Outputs& out, const int* lengths, const int* sums, int kept) {
  FOR_EACH_THREAD(t) {
    for (int row = t; row < in.batch; row += kThreads) {
      out.keep[row] = lengths[row] - 1;
      out.subsequence_begins[row] = first_row(lengths, sums, row);
    }
    if (t == 0) out.subsequence_begins[in.batch] = kept;
    for (int index = t; index < in.count(); index += kThreads) {
      const int row = index / in.block(), depth = index % in.block();
      if (depth >= lengths[row]) continue;
      const int packed = first_row(lengths, sums, row) + depth;
      out.token_ids[packed] = depth > 0 ? in.tokens[row * in.length + depth - 1] : in.anchors[row];
      out.request_rows[packed] = row;
      out.depths[packed] = depth;
      out.positions[packed] = in.anchor_positions[row] + depth;
    }
    for (int packed = kept + t; packed < in.count(); packed += kThreads) {
      out.token_ids[packed] = out.request_rows[packed] = out.depths[packed] = out.positions[packed] = 0;
    }
  }
}

}  // namespace

// Needs B * (D + 1) <= kMaxPositions and R <= kMaxBudgets. Inputs, sizes, outputs: the order is TensorRT's.
extern "C" __global__ void __launch_bounds__(kThreads)
confidence_topk_pack(const int* tokens, const float* confidence, const int* anchors, const int* anchor_positions,
                     const int* budgets, const float* cost_ms, const int* bypass, int batch, int length, int ratios,
                     int* bucket, int* keep, int* subsequence_begins, int* token_ids, int* request_rows, int* depths,
                     int* positions) {
  __shared__ Key keys[kMaxPositions];
  __shared__ double expected[kThreads];
  __shared__ double utilities[kMaxBudgets];
  __shared__ int sizes[kMaxBudgets];
  __shared__ int kept;
  const Inputs in{tokens, confidence, anchors, anchor_positions, budgets, cost_ms, bypass, batch, length, ratios};
  const Outputs out{bucket, keep, subsequence_begins, token_ids, request_rows, depths, positions};
  int sorted = 2;
  while (sorted < in.count()) sorted *= 2;

  make_keys(in, keys, sorted);
  sort_keys(keys, sorted);
  measure(in, keys, expected, sizes, utilities);

  static_assert(kMaxRows * sizeof(int) <= sizeof expected, "lengths stand where expected tokens stood");
  int* lengths = reinterpret_cast<int*>(expected);  // [kMaxRows], packed rows per request
  FOR_EACH_THREAD(t) {
    if (t == 0) kept = choose(in, sizes, utilities, bucket);
    for (int row = t; row < batch; row += kThreads) lengths[row] = 0;
  }
  FOR_EACH_THREAD(t) {
    for (int rank = t; rank < kept; rank += kThreads) atomicAdd(&lengths[candidate_of(keys[rank]) % batch], 1);
  }

  int* sums = reinterpret_cast<int*>(keys);  // [kThreads], packed rows up to the end of each kRows requests
  FOR_EACH_THREAD(t) {
    int sum = 0;
    for (int row = t * kRows; row < (t + 1) * kRows && row < batch; ++row) sum += lengths[row];
    sums[t] = sum;
  }
  inclusive_scan(sums, (batch + kRows - 1) / kRows);
  pack(in, out, lengths, sums, kept);
}
