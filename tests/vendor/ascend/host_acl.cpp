// What ACL promises, over host memory: two devices, a clock, everything done when the call returns.
//
// Written from the public C interface (the headers that the torch_npu wheel carries), so that the compiler checks every
// signature. Work is never queued: a stream is a number, an event is a moment.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "acl/acl.h"
#include "acl/acl_op_compiler.h"
#include "acl/acl_prof.h"

namespace {

constexpr int kDevices = 2;
constexpr size_t kTotal = size_t(8) << 30;  // per device
constexpr aclError kBad = ACL_ERROR_INVALID_PARAM;
constexpr aclError kNoMemory = ACL_ERROR_BAD_ALLOC;

struct Context { int device; };
struct Stream { int id; int device; int *graph; };
struct Event { uint64_t nanoseconds; bool recorded; };
struct Block { size_t size; int device; };  // device -1: pinned host memory

std::mutex lock;
std::map<uintptr_t, Block> blocks;
size_t used[kDevices];
Context contexts[kDevices] = {{0}, {1}};
thread_local int current = 0;
thread_local bool chosen = false;
std::atomic<int> next_stream{1};
std::atomic<int> saturating{0};

uint64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

bool exists(int device) { return device >= 0 && device < kDevices; }

aclError take(void **pointer, size_t size, int device) {
    if (pointer == nullptr || size == 0) return kBad;
    std::lock_guard<std::mutex> guard(lock);
    if (device >= 0 && used[device] + size > kTotal) return kNoMemory;
    void *found = aligned_alloc(512, (size + 511) / 512 * 512);
    if (found == nullptr) return kNoMemory;
    blocks[uintptr_t(found)] = {size, device};
    if (device >= 0) used[device] += size;
    *pointer = found;
    return ACL_SUCCESS;
}

aclError give_back(void *pointer) {
    std::lock_guard<std::mutex> guard(lock);
    auto found = blocks.find(uintptr_t(pointer));
    if (found == blocks.end()) return kBad;
    if (found->second.device >= 0) used[found->second.device] -= found->second.size;
    blocks.erase(found);
    free(pointer);
    return ACL_SUCCESS;
}

const Block *holding(const void *pointer) {
    auto after = blocks.upper_bound(uintptr_t(pointer));
    if (after == blocks.begin()) return nullptr;
    --after;
    return uintptr_t(pointer) < after->first + after->second.size ? &after->second : nullptr;
}

}  // namespace

extern "C" {

// --- the process and its devices -------------------------------------------------------------------

aclError aclInit(const char *) { return ACL_SUCCESS; }
aclError aclFinalize() { return ACL_SUCCESS; }
const char *aclrtGetSocName() {
    const char *name = getenv("HOST_ACL_SOC");
    return name ? name : "Ascend910B4";
}
const char *aclGetRecentErrMsg() { return ""; }
aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
aclError aclrtGetLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }

aclError aclrtGetDeviceCount(uint32_t *count) {
    const char *visible = getenv("ASCEND_RT_VISIBLE_DEVICES");
    *count = kDevices;
    if (visible) {
        uint32_t named = 0;
        for (const char *c = visible; *c; ++c) named += *c >= '0' && *c < '0' + kDevices;
        *count = named;
    }
    return ACL_SUCCESS;
}

aclError aclrtSetDevice(int32_t device) {
    if (!exists(device)) return ACL_ERROR_RT_INVALID_DEVICEID;
    current = device;
    chosen = true;
    return ACL_SUCCESS;
}

aclError aclrtResetDevice(int32_t) { return ACL_SUCCESS; }

aclError aclrtGetDevice(int32_t *device) {
    if (!chosen) return ACL_ERROR_RT_CONTEXT_NULL;
    *device = current;
    return ACL_SUCCESS;
}

aclError aclrtGetCurrentContext(aclrtContext *context) {
    if (!chosen) return ACL_ERROR_RT_CONTEXT_NULL;
    *context = &contexts[current];
    return ACL_SUCCESS;
}

aclError aclrtSetCurrentContext(aclrtContext context) {
    if (context == nullptr) return kBad;
    return aclrtSetDevice(static_cast<Context *>(context)->device);
}

aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) {
    if (flags) *flags = 0;
    if (active) *active = chosen && device == current;
    return ACL_SUCCESS;
}

aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) {
    if (!exists(device) || !exists(peer)) return ACL_ERROR_RT_INVALID_DEVICEID;
    *can = device != peer;
    return ACL_SUCCESS;
}

aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) { return ACL_SUCCESS; }

aclError aclrtGetDeviceUtilizationRate(int32_t, aclrtUtilizationInfo *info) {
    memset(info, 0, sizeof *info);
    return ACL_SUCCESS;
}

aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr, int64_t *value) {
    *value = 20;  // of each kind of core
    return ACL_SUCCESS;
}

aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo, int64_t *value) {
    *value = 20;
    return ACL_SUCCESS;
}

aclError aclrtDeviceGetUuid(int32_t device, aclrtUuid *uuid) {
    memset(uuid, 0, sizeof *uuid);
    reinterpret_cast<char *>(uuid)[0] = char(device + 1);
    return ACL_SUCCESS;
}

aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion *version) {
    memset(version, 0, sizeof *version);
    strcpy(version->version, "8.5.0");
    return ACL_SUCCESS;
}

aclError aclsysGetVersionStr(char *, char *version) {
    strcpy(version, "8.5.0");
    return ACL_SUCCESS;
}

// --- settings that steer kernels: kept, without effect ------------------------------------------------

static int64_t settings[64];
aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
    settings[int(option) & 63] = value;
    return ACL_SUCCESS;
}
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) { return aclrtSetSysParamOpt(option, value); }
aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t *value) {
    *value = settings[int(option) & 63];
    return ACL_SUCCESS;
}
aclError aclrtCtxGetSysParamOpt(aclSysParamOpt option, int64_t *value) { return aclrtGetSysParamOpt(option, value); }
aclError aclSetCompileopt(aclCompileOpt, const char *) { return ACL_SUCCESS; }
size_t aclGetCompileoptSize(aclCompileOpt) { return 8; }
aclError aclGetCompileopt(aclCompileOpt, char *value, size_t size) {
    memset(value, 0, size);
    return ACL_SUCCESS;
}
aclError aclrtSetOpWaitTimeout(uint32_t) { return ACL_SUCCESS; }
aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }
aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return ACL_SUCCESS; }
aclError aclrtSetStreamAttribute(aclrtStream, aclrtStreamAttr, aclrtStreamAttrValue *) { return ACL_SUCCESS; }
aclError aclrtSetStreamOverflowSwitch(aclrtStream, uint32_t) { return ACL_SUCCESS; }
aclError aclrtGetStreamOverflowSwitch(aclrtStream, uint32_t *flag) {
    *flag = 0;
    return ACL_SUCCESS;
}
aclError aclrtSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
aclError aclrtUnSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }

// --- memory ------------------------------------------------------------------------------------------

aclError aclrtMalloc(void **pointer, size_t size, aclrtMemMallocPolicy) { return take(pointer, size, current); }
aclError aclrtMallocAlign32(void **pointer, size_t size, aclrtMemMallocPolicy) { return take(pointer, size, current); }
aclError aclrtMallocWithCfg(void **pointer, size_t size, aclrtMemMallocPolicy, aclrtMallocConfig *) {
    return take(pointer, size, current);
}
aclError aclrtFree(void *pointer) { return give_back(pointer); }
aclError aclrtMallocHost(void **pointer, size_t size) { return take(pointer, size, -1); }
aclError aclrtMallocHostWithCfg(void **pointer, uint64_t size, aclrtMallocConfig *) { return take(pointer, size, -1); }
aclError aclrtFreeHost(void *pointer) { return give_back(pointer); }

aclError aclrtGetMemInfo(aclrtMemAttr, size_t *free, size_t *total) {
    std::lock_guard<std::mutex> guard(lock);
    *total = kTotal;
    *free = kTotal - used[current];
    return ACL_SUCCESS;
}

aclError aclrtMemcpy(void *to, size_t room, const void *from, size_t count, aclrtMemcpyKind) {
    if (count > room) return kBad;
    memmove(to, from, count);
    return ACL_SUCCESS;
}

aclError aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t count, aclrtMemcpyKind kind, aclrtStream) {
    return aclrtMemcpy(to, room, from, count, kind);
}

aclError aclrtMemcpyAsyncWithCondition(void *to, size_t room, const void *from, size_t count, aclrtMemcpyKind kind,
                                       aclrtStream) {
    return aclrtMemcpy(to, room, from, count, kind);
}

aclError aclrtMemset(void *to, size_t room, int32_t value, size_t count) {
    if (count > room) return kBad;
    memset(to, value, count);
    return ACL_SUCCESS;
}

aclError aclrtMemsetAsync(void *to, size_t room, int32_t value, size_t count, aclrtStream) {
    return aclrtMemset(to, room, value, count);
}

aclError aclrtPointerGetAttributes(const void *pointer, aclrtPtrAttributes *attributes) {
    std::lock_guard<std::mutex> guard(lock);
    memset(attributes, 0, sizeof *attributes);
    const Block *block = holding(pointer);
    attributes->location.type = block == nullptr       ? ACL_MEM_LOCATION_TYPE_UNREGISTERED
                                : block->device >= 0 ? ACL_MEM_LOCATION_TYPE_DEVICE
                                                     : ACL_MEM_LOCATION_TYPE_HOST;
    attributes->location.id = block && block->device >= 0 ? block->device : 0;
    return ACL_SUCCESS;
}

aclError aclrtHostRegister(void *pointer, uint64_t, aclrtHostRegisterType, void **on_device) {
    *on_device = pointer;
    return ACL_SUCCESS;
}
aclError aclrtHostUnregister(void *) { return ACL_SUCCESS; }

// --- operators that torch_npu's C++ collectives run by themselves on new buffers ---------------------

struct aclTensorDesc { aclDataType type; std::vector<int64_t> sizes; };
struct aclDataBuffer { void *data; size_t size; };
aclTensorDesc *aclCreateTensorDesc(aclDataType type, int dimensions, const int64_t *sizes, aclFormat) {
    return new aclTensorDesc{type, std::vector<int64_t>(sizes, sizes + dimensions)};
}
void aclDestroyTensorDesc(const aclTensorDesc *desc) { delete desc; }
aclDataBuffer *aclCreateDataBuffer(void *data, size_t size) { return new aclDataBuffer{data, size}; }
aclError aclDestroyDataBuffer(const aclDataBuffer *buffer) {
    delete buffer;
    return ACL_SUCCESS;
}

static aclError execute(const char *name, int inputs, const aclTensorDesc *const *descs, const aclDataBuffer *const *in,
                        const aclDataBuffer *const *out) {
    char *to = static_cast<char *>(out[0]->data);
    if (strcmp(name, "Fill") == 0 && inputs == 2 && in[1]->size) {
        for (size_t at = 0; at + in[1]->size <= out[0]->size; at += in[1]->size) memcpy(to + at, in[1]->data, in[1]->size);
        return ACL_SUCCESS;
    }
    if (strcmp(name, "PadV3") == 0 && inputs == 3) {  // tensor, paddings, value
        const auto &sizes = descs[0]->sizes;
        size_t width = in[2]->size, rank = sizes.size();
        if (in[1]->size != rank * 2 * sizeof(int32_t)) return ACL_ERROR_OP_NOT_FOUND;
        const auto *pads = static_cast<const int32_t *>(in[1]->data);
        for (size_t at = 0; at + width <= out[0]->size; at += width) memcpy(to + at, in[2]->data, width);
        const char *from = static_cast<const char *>(in[0]->data);
        for (size_t index = 0; index * width < in[0]->size; ++index) {
            size_t rest = index, place = 0, stride = 1;
            for (size_t dimension = rank; dimension-- > 0;) {
                place += (rest % sizes[dimension] + pads[2 * dimension]) * stride;
                rest /= sizes[dimension];
                stride *= sizes[dimension] + pads[2 * dimension] + pads[2 * dimension + 1];
            }
            memcpy(to + place * width, from + index * width, width);
        }
        return ACL_SUCCESS;
    }
    return ACL_ERROR_OP_NOT_FOUND;
}
aclError aclopCompileAndExecute(const char *name, int inputs, const aclTensorDesc *const descs[],
                                const aclDataBuffer *const in[], int, const aclTensorDesc *const[], aclDataBuffer *const out[], const aclopAttr *,
                                aclopEngineType, aclopCompileType, const char *, aclrtStream) {
    return execute(name, inputs, descs, in, out);
}
aclError aclopCompileAndExecuteV2(const char *name, int inputs, aclTensorDesc *descs[], aclDataBuffer *in[], int,
                                  aclTensorDesc *[], aclDataBuffer *out[], aclopAttr *, aclopEngineType,
                                  aclopCompileType, const char *, aclrtStream) {
    return execute(name, inputs, descs, in, out);
}

// --- the profiler of the chip has nothing to say ---------------------------------------------------------

aclError aclprofInit(const char *, size_t) { return ACL_SUCCESS; }
aclError aclprofStart(const aclprofConfig *) { return ACL_SUCCESS; }
aclError aclprofStop(const aclprofConfig *) { return ACL_SUCCESS; }
aclError aclprofFinalize() { return ACL_SUCCESS; }
aclError aclprofWarmup(const aclprofConfig *) { return ACL_SUCCESS; }
aclError aclprofSetConfig(aclprofConfigType, const char *, size_t) { return ACL_SUCCESS; }
aclprofConfig *aclprofCreateConfig(uint32_t *, uint32_t, aclprofAicoreMetrics, const aclprofAicoreEvents *, uint64_t) {
    static int config;
    return reinterpret_cast<aclprofConfig *>(&config);
}
aclError aclprofDestroyConfig(const aclprofConfig *) { return ACL_SUCCESS; }

// --- streams and events ------------------------------------------------------------------------------

aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t, uint32_t) {
    *stream = new Stream{next_stream++, current, nullptr};
    return ACL_SUCCESS;
}
aclError aclrtCreateStream(aclrtStream *stream) { return aclrtCreateStreamWithConfig(stream, 0, 0); }
aclError aclrtDestroyStream(aclrtStream stream) {
    delete static_cast<Stream *>(stream);
    return ACL_SUCCESS;
}
aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }
aclError aclrtSynchronizeStream(aclrtStream) { return ACL_SUCCESS; }
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream, int32_t) { return ACL_SUCCESS; }
aclError aclrtSynchronizeDevice() { return ACL_SUCCESS; }
aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return ACL_SUCCESS; }
aclError aclrtStreamQuery(aclrtStream, aclrtStreamStatus *status) {
    *status = ACL_STREAM_STATUS_COMPLETE;
    return ACL_SUCCESS;
}
aclError aclrtStreamGetId(aclrtStream stream, int32_t *id) {
    *id = stream ? static_cast<Stream *>(stream)->id : 0;
    return ACL_SUCCESS;
}

aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t) {
    *event = new Event{0, false};
    return ACL_SUCCESS;
}
aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t flag) { return aclrtCreateEventExWithFlag(event, flag); }
aclError aclrtCreateEvent(aclrtEvent *event) { return aclrtCreateEventExWithFlag(event, 0); }
aclError aclrtDestroyEvent(aclrtEvent event) {
    delete static_cast<Event *>(event);
    return ACL_SUCCESS;
}
aclError aclrtRecordEvent(aclrtEvent event, aclrtStream) {
    *static_cast<Event *>(event) = {now(), true};
    return ACL_SUCCESS;
}
aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return ACL_SUCCESS; }
aclError aclrtStreamWaitEvent(aclrtStream, aclrtEvent) { return ACL_SUCCESS; }
aclError aclrtSynchronizeEvent(aclrtEvent) { return ACL_SUCCESS; }
aclError aclrtQueryEventStatus(aclrtEvent, aclrtEventRecordedStatus *status) {
    *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
    return ACL_SUCCESS;
}
aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus *status) {
    *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
    return ACL_SUCCESS;
}
aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent start, aclrtEvent end) {
    auto *first = static_cast<Event *>(start), *last = static_cast<Event *>(end);
    if (!first->recorded || !last->recorded) return kBad;
    *milliseconds = float(double(int64_t(last->nanoseconds - first->nanoseconds)) / 1e6);
    return ACL_SUCCESS;
}
aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t *microseconds) {
    *microseconds = static_cast<Event *>(event)->nanoseconds / 1000;
    return ACL_SUCCESS;
}

aclError aclrtLaunchCallback(aclrtCallback function, void *argument, aclrtCallbackBlockType, aclrtStream) {
    function(argument);
    return ACL_SUCCESS;
}
aclError aclrtLaunchHostFunc(aclrtStream, aclrtHostFunc function, void *argument) {
    function(argument);
    return ACL_SUCCESS;
}

// --- overflow mode: 1 saturates, 0 makes infinities --------------------------------------------------

aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode) {
    saturating = mode == ACL_RT_OVERFLOW_MODE_SATURATION;
    return ACL_SUCCESS;
}
aclError aclrtGetDeviceSatMode(aclrtFloatOverflowMode *mode) {
    *mode = saturating ? ACL_RT_OVERFLOW_MODE_SATURATION : ACL_RT_OVERFLOW_MODE_INFNAN;
    return ACL_SUCCESS;
}
aclError aclGetCannAttribute(aclCannAttr, int32_t *value) {
    *value = 1;  // infinities are supported
    return ACL_SUCCESS;
}
aclError aclGetCannAttributeList(const aclCannAttr **list, size_t *count) {
    static const aclCannAttr known[] = {ACL_CANN_ATTR_INF_NAN};
    *list = known;
    *count = 1;
    return ACL_SUCCESS;
}

// --- graphs: a capture holds no work, since work is done at once -------------------------------------

aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode) {
    static_cast<Stream *>(stream)->graph = new int(0);
    return ACL_SUCCESS;
}
aclError aclmdlRICaptureEnd(aclrtStream stream, aclmdlRI *graph) {
    *graph = reinterpret_cast<aclmdlRI>(static_cast<Stream *>(stream)->graph);
    static_cast<Stream *>(stream)->graph = nullptr;
    return ACL_SUCCESS;
}
aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus *status, aclmdlRI *graph) {
    int *found = stream ? static_cast<Stream *>(stream)->graph : nullptr;
    *status = found ? ACL_MODEL_RI_CAPTURE_STATUS_ACTIVE : ACL_MODEL_RI_CAPTURE_STATUS_NONE;
    if (graph) *graph = reinterpret_cast<aclmdlRI>(found);
    return ACL_SUCCESS;
}
aclError aclmdlRIExecuteAsync(aclmdlRI, aclrtStream) { return ACL_SUCCESS; }
aclError aclmdlRIDestroy(aclmdlRI graph) {
    delete reinterpret_cast<int *>(graph);
    return ACL_SUCCESS;
}
aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode *) { return ACL_SUCCESS; }

}
