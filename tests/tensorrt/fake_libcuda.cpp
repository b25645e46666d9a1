// A stand-in for the CUDA driver: device memory is the host's, and the one kernel it knows is the host build of
// kernel.cu (KERNEL_SOURCE). Compiled against NVIDIA's cuda.h, so each function has the driver's name and prototype.
#include <cuda.h>

#include "host_block.h"
#include KERNEL_SOURCE

#include <cstdlib>
#include <numeric>
#include <vector>

struct Launch {
  const void* pointers[14];
  int sizes[3];
};
static std::vector<Launch> captured;
static bool capturing = false;
static char token;  // every handle

template <typename T>
static CUresult give(T* out, T value) {
  *out = value;
  return CUDA_SUCCESS;
}
template <typename T>
static CUresult give_handle(T* out) {
  return give(out, reinterpret_cast<T>(&token));
}
template <typename T>
static CUresult known(T handle) {
  return reinterpret_cast<char*>(handle) == &token ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

static void run(const Launch& launch) {
  int order[1024];
  std::iota(order, order + 1024, 0);
  set_order(order, order, order);
  auto in = [&](int index) { return static_cast<const int*>(launch.pointers[index]); };
  auto floats = [&](int index) { return static_cast<const float*>(launch.pointers[index]); };
  auto out = [&](int index) { return const_cast<int*>(in(index)); };
  confidence_topk_pack(in(0), floats(1), in(2), in(3), in(4), floats(5), in(6), launch.sizes[0], launch.sizes[1],
                       launch.sizes[2], out(7), out(8), out(9), out(10), out(11), out(12), out(13));
}

extern "C" {
CUresult cuInit(unsigned flags) { return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult, const char** text) { return give(text, "said by the stand-in"); }
CUresult cuDriverGetVersion(int* version) { return give(version, 13000); }
CUresult cuDeviceGet(CUdevice* device, int ordinal) { return give(device, ordinal); }
CUresult cuDeviceGetName(char* name, int length, CUdevice) {
  std::strncpy(name, "stand-in", length);
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  if (attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) return give(value, 9);
  if (attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR) return give(value, 0);
  return CUDA_ERROR_INVALID_VALUE;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) { return give_handle(context); }
CUresult cuCtxSetCurrent(CUcontext context) { return known(context); }
CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  return std::strstr(static_cast<const char*>(image), ".target sm_90") ? give_handle(module) : CUDA_ERROR_INVALID_PTX;
}
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  if (std::strcmp(name, "confidence_topk_pack")) return CUDA_ERROR_NOT_FOUND;
  return known(module) ? known(module) : give_handle(function);
}
CUresult cuMemAlloc(CUdeviceptr* address, size_t size) {
  return give(address, reinterpret_cast<CUdeviceptr>(std::malloc(size)));
}
CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t size) {
  std::memcpy(reinterpret_cast<void*>(to), from, size);
  return CUDA_SUCCESS;
}
CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, size_t size) {
  std::memcpy(to, reinterpret_cast<void*>(from), size);
  return CUDA_SUCCESS;
}
CUresult cuStreamCreate(CUstream* stream, unsigned) { return give_handle(stream); }
CUresult cuStreamSynchronize(CUstream stream) { return known(stream); }
CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode) {
  capturing = true;
  captured.clear();
  return known(stream);
}
CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
  capturing = false;
  return known(stream) ? known(stream) : give_handle(graph);
}
CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void** params, void**) {
  if (grid_x * grid_y * grid_z != 1 || block_x != kThreads || block_y * block_z != 1 || shared != 0 || known(stream))
    return CUDA_ERROR_INVALID_VALUE;
  Launch launch;
  for (int index = 0; index < 17; ++index) {
    const int pointer = index < 7 ? index : index - 3;
    if (index >= 7 && index < 10) launch.sizes[index - 7] = *static_cast<int*>(params[index]);
    else launch.pointers[pointer] = *static_cast<void**>(params[index]);
  }
  if (capturing) captured.push_back(launch);
  else run(launch);
  return known(function);
}
CUresult cuGraphInstantiateWithFlags(CUgraphExec* executable, CUgraph graph, unsigned long long) {
  return known(graph) ? known(graph) : give_handle(executable);
}
CUresult cuGraphLaunch(CUgraphExec executable, CUstream stream) {
  for (const Launch& launch : captured) run(launch);
  return known(executable) ? known(executable) : known(stream);
}
CUresult cuGraphExecDestroy(CUgraphExec executable) { return known(executable); }
CUresult cuGraphDestroy(CUgraph graph) { return known(graph); }
CUresult cuEventCreate(CUevent* event, unsigned) { return give_handle(event); }
CUresult cuEventRecord(CUevent event, CUstream stream) { return known(event) ? known(event) : known(stream); }
CUresult cuEventElapsedTime(float* milliseconds, CUevent start, CUevent) {
  return known(start) ? known(start) : give(milliseconds, 0.8f);
}
}
