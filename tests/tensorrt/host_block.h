// Runs a block of kernel.cu's phases on one CPU thread, for a test that compares the kernel with numpy. Whatever order
// the threads of a phase, the warps of a warp phase and the lanes of a step run in, the result must be the same.
#include <cmath>
#include <cstring>

#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(threads)

static int thread_order[1025], warp_order[33], lane_order[33];  // one more than is run, for the step past the end

#define FOR_EACH_THREAD(t) for (int i_##t = 0, t = thread_order[0]; i_##t < kThreads; t = thread_order[++i_##t])
#define FOR_EACH_WARP(w) for (int i_##w = 0, w = warp_order[0]; i_##w < kThreads / kWarp; w = warp_order[++i_##w])
#define FOR_EACH_LANE(t, w)                                              \
  for (int i_##t = 0, t = w * kWarp + lane_order[0]; i_##t < kWarp; \
       t = w * kWarp + lane_order[++i_##t])
#define PER_THREAD(type, name) type name[kThreads]
#define OWN(name, t) name[t]

static unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
static float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
static void atomicAdd(int* sum, int value) { *sum += value; }

extern "C" void set_order(const int* threads, const int* warps, const int* lanes) {
  std::memcpy(thread_order, threads, 1024 * sizeof(int));
  std::memcpy(warp_order, warps, 32 * sizeof(int));
  std::memcpy(lane_order, lanes, 32 * sizeof(int));
}
