// What HCCL promises in a world of one rank: a collective copies its input to its output.
//
// Written from the public C interface, like host_acl.cpp beside it.
#include <cstdint>
#include <cstring>

#include "third_party/hccl/inc/hccl/hccl.h"

namespace {

size_t width(HcclDataType type) {
    switch (type) {
        case HCCL_DATA_TYPE_INT16: case HCCL_DATA_TYPE_UINT16: case HCCL_DATA_TYPE_FP16: case HCCL_DATA_TYPE_BFP16:
            return 2;
        case HCCL_DATA_TYPE_INT32: case HCCL_DATA_TYPE_UINT32: case HCCL_DATA_TYPE_FP32:
            return 4;
        case HCCL_DATA_TYPE_INT64: case HCCL_DATA_TYPE_UINT64: case HCCL_DATA_TYPE_FP64:
            return 8;
        case HCCL_DATA_TYPE_INT128:
            return 16;
        default:
            return 1;
    }
}

HcclResult move(void *to, const void *from, uint64_t count, HcclDataType type) {
    if (to != from) memmove(to, from, count * width(type));
    return HCCL_SUCCESS;
}

}  // namespace

extern "C" {

HcclResult HcclGetRootInfo(HcclRootInfo *info) {
    memset(info, 0, sizeof *info);
    return HCCL_SUCCESS;
}
static HcclResult open_world(uint32_t ranks, HcclComm *comm) {
    if (ranks != 1) return HCCL_E_NOT_SUPPORT;
    *comm = reinterpret_cast<HcclComm>(new int(0));
    return HCCL_SUCCESS;
}
HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo *, uint32_t, HcclComm *comm) {
    return open_world(ranks, comm);
}
HcclResult HcclCommInitRootInfoConfig(uint32_t ranks, const HcclRootInfo *, uint32_t, const HcclCommConfig *,
                                      HcclComm *comm) {
    return open_world(ranks, comm);
}
HcclResult HcclCommDestroy(HcclComm comm) {
    delete reinterpret_cast<int *>(comm);
    return HCCL_SUCCESS;
}
HcclResult HcclGetCommAsyncError(HcclComm, HcclResult *error) {
    *error = HCCL_SUCCESS;
    return HCCL_SUCCESS;
}
HcclResult HcclGetCommName(HcclComm, char *name) {
    strcpy(name, "host");
    return HCCL_SUCCESS;
}
uint32_t HcclGetCommConfigCapability() { return 0; }
const char *HcclGetErrorString(HcclResult code) { return code == HCCL_SUCCESS ? "no error" : "error"; }
HcclResult HcclAllReduce(void *from, void *to, uint64_t count, HcclDataType type, HcclReduceOp, HcclComm, aclrtStream) {
    return move(to, from, count, type);
}
HcclResult HcclReduce(void *from, void *to, uint64_t count, HcclDataType type, HcclReduceOp, uint32_t, HcclComm,
                      aclrtStream) {
    return move(to, from, count, type);
}
HcclResult HcclBroadcast(void *, uint64_t, HcclDataType, uint32_t, HcclComm, aclrtStream) { return HCCL_SUCCESS; }
HcclResult HcclAllGather(void *from, void *to, uint64_t count, HcclDataType type, HcclComm, aclrtStream) {
    return move(to, from, count, type);
}
HcclResult HcclReduceScatter(void *from, void *to, uint64_t count, HcclDataType type, HcclReduceOp, HcclComm,
                             aclrtStream) {
    return move(to, from, count, type);
}
HcclResult HcclScatter(void *from, void *to, uint64_t count, HcclDataType type, uint32_t, HcclComm, aclrtStream) {
    return move(to, from, count, type);
}
HcclResult HcclAlltoAll(const void *from, uint64_t count, HcclDataType type, const void *to, uint64_t, HcclDataType,
                        HcclComm, aclrtStream) {
    return move(const_cast<void *>(to), from, count, type);
}
HcclResult HcclAlltoAllV(const void *from, const void *counts, const void *, HcclDataType type, const void *to,
                         const void *, const void *, HcclDataType, HcclComm, aclrtStream) {
    return move(const_cast<void *>(to), from, *static_cast<const uint64_t *>(counts), type);
}
}
